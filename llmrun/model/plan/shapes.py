"""The shapes of what a plan stores for each sequence, the KV cache and recurrent states, and the reach of attention.

Recurrent states summarize all earlier positions of a sequence in a fixed amount of memory. Updates of a state cannot be
undone. To be able to remove the last rows of a sequence, a layer keeps the state before them and their inputs. The next
step first applies the rows that have not been removed (layouts/kv.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.kv import BLOCK, REPLAY_ROWS, HeadLayout, parse_kv_type

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
    reaches: Sequence[Reach],
    positions: NDArray[np.int32],
    sequences: NDArray[np.integer],
    ahead: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return int32[reaches, rows, 2]: the first position that each row attends to, and the one after the last.

    positions  int32[rows]
    sequences  [rows], any numbers that tell the sequences apart
    ahead      int32[reaches, rows], how many more of the following positions a row of an image sees; None for none
    """
    edges = _edges(tuple(reaches))
    ranges = positions[:, None] + edges
    np.maximum(ranges, 0, out=ranges)
    if ahead is not None:
        ranges[..., 1] += ahead
    if any(reach.ahead for reach in reaches):
        _, numbers = np.unique(sequences, return_inverse=True)
        ends = np.zeros(numbers.max(initial=0) + 1, np.int32)
        np.maximum.at(ends, numbers, positions + np.int32(1))
        np.minimum(ranges[..., 1], ends[numbers], out=ranges[..., 1])
    return ranges


_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The head counts and sizes of an attention layer.

    heads       number of query heads, a multiple of `kv_heads` with grouped-query attention (GQA)
    head_size   features of each query and key head
    window      number of positions that a row attends to, including its own; 0 means all earlier positions
    value_size  features of each value head; 0 means the same as `head_size`
    around      without a causal mask, the number of positions before and after its own that a row attends to, or ALL;
                None with a causal mask
    """

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    value_size: int = 0
    around: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_size", self.value_size or self.head_size)

    @property
    def reach(self) -> Reach:
        """The positions that a row attends to, relative to its own."""
        if self.around is not None:
            return Reach(self.around, self.around)
        return Reach(self.window - 1 if self.window else ALL, 0)

    def layout(self, kv_type: str) -> HeadLayout:
        """Return the cache layout of one KV head."""
        return HeadLayout(*parse_kv_type(kv_type), self.head_size, self.value_size)

    def block_bytes(self, kv_type: str) -> int:
        """Return the size in bytes of one cache block in one layer."""
        return self.kv_heads * self.layout(kv_type).n_bytes


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A short convolution over positions. Each row depends on `taps` positions, including its own.

    The cache's blocks store the inputs as float32[position, feature].
    """

    width: int
    taps: int

    @property
    def window(self) -> int:
        return self.taps

    def block_bytes(self, kv_type: str) -> int:
        return _FLOAT * self.width * BLOCK


KVShape = AttentionShape | ConvolutionShape


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The location of one layer's keys and values in the KV cache: the layer's group, and its index in that group."""

    shape: KVShape
    group: int
    layer: int


@dataclass(slots=True)
class KVGroup:
    """All layers of one shape. They share a single cache array."""

    shape: KVShape
    layers: int = 0


_LANES = 16


@dataclass(frozen=True, slots=True)
class ConvolutionState:
    """The last inputs of a causal convolution with `width` features.

    Each output row depends on the inputs of `taps` positions.

    The state is a ring buffer of float32[ring rows, width]. Position p is in row p % ring rows.
    """

    width: int
    taps: int

    @property
    def ring_rows(self) -> int:
        return REPLAY_ROWS + self.taps

    @property
    def row_bytes(self) -> int:
        return _FLOAT * round_up(self.width, _LANES)

    @property
    def n_bytes(self) -> int:
        """The size of one layer's state of one sequence."""
        return self.ring_rows * self.row_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """The size of one layer's part of a checkpoint, which has only the rows before the checkpoint's position."""
        return (self.taps - 1) * self.row_bytes


@dataclass(frozen=True, slots=True)
class MatrixState:
    """A matrix per head, and two replay buffers (layouts/kv.py).

    heads       number of value heads, each of which has a matrix of float32[key size, value size]
    key_heads   number of key heads, a divisor of `heads`
    gates       number of gates per head: 2 in the delta rule (gate and beta), 1 in SSD, and one for each feature of a
                value in the selective scan
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    gates: int

    @property
    def matrix_bytes(self) -> int:
        """The size of the matrices of all heads."""
        return _FLOAT * self.heads * self.key_size * self.value_size

    @property
    def row_bytes(self) -> int:
        """The size of a row in a replay buffer: its keys, values and gates."""
        keys, values = self.key_heads * self.key_size, self.heads * self.value_size
        return _FLOAT * round_up(keys + values + self.gates * self.heads, _LANES)

    @property
    def n_bytes(self) -> int:
        """The size of one layer's state of one sequence."""
        return self.matrix_bytes + 2 * REPLAY_ROWS * self.row_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """The size of one layer's part of a checkpoint, which has only the matrices."""
        return self.matrix_bytes


StateShape = ConvolutionState | MatrixState


@dataclass(frozen=True, slots=True)
class LayerState:
    """The location of one layer's state: the layer's group, and its index in that group."""

    shape: StateShape
    group: int
    layer: int


@dataclass(slots=True)
class StateGroup:
    """All layers whose states have the same shape. They share a single array."""

    shape: StateShape
    layers: int = 0
