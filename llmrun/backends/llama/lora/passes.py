"""Divides a batch into forward passes of llama.cpp, each with the same adapters for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.types import HIDDEN, LOGITS, Outputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.types import Batch

Scales = tuple[float, ...]


def passes_of(
    batch: Batch, n_adapters: int, max_rows: int, max_wanted: int
) -> Iterator[tuple[Scales, NDArray[np.intp]]]:
    """Yield the scales of the adapters and the rows of each pass. Each pass has as many rows as one request can have.

    The rows of a sequence stay in order, because the adapters of a sequence can only become more from row to row, and
    rows with fewer adapters come first.
    """
    rows = np.arange(len(batch.tokens))
    if batch.scales is None:
        groups = [((0.0,) * n_adapters, rows)]
    else:
        each = [tuple(scales) for scales in batch.scales.tolist()]
        combinations = sorted(dict.fromkeys(each), key=np.count_nonzero)
        groups = [(scales, rows[[one == scales for one in each]]) for scales in combinations]
    for scales, own in groups:
        for part in _split(batch.want[own], max_rows, max_wanted):
            yield scales, own[part]


def in_order(batch: Batch, passes: Sequence[NDArray[np.intp]], parts: Sequence[Outputs]) -> Outputs:
    """Return the outputs of passes in the order of the batch's rows."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate(passes)
    joined = Outputs(*map(np.concatenate, zip(*parts, strict=True)))
    want = batch.want[rows]
    return Outputs(
        joined.logits[np.argsort(rows[want & LOGITS != 0])], joined.hidden[np.argsort(rows[want & HIDDEN != 0])]
    )


def _split(want: NDArray[np.uint8], max_rows: int, max_wanted: int) -> Iterator[slice]:
    """Split rows into consecutive slices that each fit in one request."""
    if (want & HIDDEN).any():  # such passes return all rows
        yield from (slice(start, start + max_wanted) for start in range(0, len(want), max_wanted))
        return
    start = wanted = 0
    for row, asked in enumerate((want != 0).tolist()):
        if row - start == max_rows or wanted + asked > max_wanted:
            yield slice(start, row)
            start, wanted = row, 0
        wanted += asked
    yield slice(start, len(want))
