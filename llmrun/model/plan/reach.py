"""The positions that a row attends to, relative to its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALL: Final = 1 << 30  # a number of positions that is larger than any context


class Reach(NamedTuple):
    """How far a row sees: up to `back` positions before its own and up to `ahead` positions after it.

    `ahead` is 0 with a causal mask. Otherwise, all rows of a sequence must be in one step.
    """

    back: int
    ahead: int

    def seen_from(self, position: int, length: int) -> slice:
        """Return the positions that the row at `position` attends to in a sequence of `length` positions."""
        return slice(max(0, position - self.back), min(position + self.ahead + 1, length))


@cache
def _edges(reaches: tuple[Reach, ...]) -> NDArray[np.int32]:
    """Return int32[reaches, 1, 2], which is what `seen_ranges` returns for position 0 without limits."""
    return np.array([[(-reach.back, reach.ahead + 1)] for reach in reaches], np.int32).reshape(-1, 1, 2)


def seen_ranges(
    reaches: Sequence[Reach], positions: NDArray[np.int32], sequences: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Return int32[reaches, rows, 2]: the first position that each row attends to, and the one after the last.

    positions  int32[rows]
    sequences  [rows], any numbers that tell the sequences apart
    """
    edges = _edges(tuple(reaches))
    ranges = positions[:, None] + edges
    np.maximum(ranges, 0, out=ranges)
    if any(reach.ahead for reach in reaches):
        _, numbers = np.unique(sequences, return_inverse=True)
        ends = np.zeros(numbers.max(initial=0) + 1, np.int32)
        np.maximum.at(ends, numbers, positions + np.int32(1))
        np.minimum(ranges[..., 1], ends[numbers], out=ranges[..., 1])
    return ranges
