"""Runs rows of tokens on a backend and yields their logits in slices, so that they take little memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.types import LOGITS, Batch
from llmrun.engine.adapters import adapted_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend

# The memory for the logits of one forward pass. With a vocabulary of 151,936 tokens, these are 110 rows.
_LOGITS_BYTES: Final = 64 << 20
_LEAST_ROWS: Final = 16


def rows_at_a_time(vocabulary_size: int) -> int:
    """Return how many rows of logits a forward pass should return at most."""
    return max(_LEAST_ROWS, _LOGITS_BYTES // (4 * vocabulary_size))


def batch_of(tokens: NDArray[np.int32], seq: int, start: int, first: int) -> Batch:
    """Return a batch of one sequence whose rows begin at position `start`, and want logits from position `first` on."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    want = (positions >= first) * np.uint8(LOGITS)
    return Batch(np.ascontiguousarray(tokens), np.full(len(tokens), seq, np.int32), positions, want)


def joined(batches: list[Batch]) -> Batch:
    """Return a batch with the rows of several batches, one after another."""
    return Batch(
        np.concatenate([batch.tokens for batch in batches]),
        np.concatenate([batch.seq for batch in batches]),
        np.concatenate([batch.pos for batch in batches]),
        np.concatenate([batch.want for batch in batches]),
    )


def adapted(backend: Backend, batch: Batch) -> Batch:
    """Return a batch to which the model's LoRA adapters apply, with the scales with which they were opened.

    Those with invocation tokens do not apply, because texts have none.
    """
    adapters = adapted_tokens(None, backend.info.adapters, ())
    return batch if adapters is None else replace(batch, scales=adapters.rows(0, len(batch.tokens)))


def logits_in_slices(backend: Backend, batch: Batch, most: int) -> Iterator[NDArray[np.float32]]:
    """Run a batch and yield the logits of its wanted rows, float32[up to `most`, vocabulary], in order.

    Raises the errors of `Backend.forward`.
    """
    wanted = np.flatnonzero(batch.want)
    ends = [*(wanted[most - 1 :: most] + 1).tolist(), len(batch.want)]
    start = 0
    for end in ends:
        if end == start:
            continue
        rows = slice(start, end)
        part = Batch(batch.tokens[rows], batch.seq[rows], batch.pos[rows], batch.want[rows])
        logits = backend.forward(adapted(backend, part)).logits
        if len(logits):
            yield logits
        start = end
