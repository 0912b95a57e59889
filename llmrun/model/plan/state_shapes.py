"""The shapes of recurrent states, which summarize all earlier positions of a sequence in a fixed amount of memory.

Updates of a state cannot be undone. To be able to remove the last rows of a sequence, a layer keeps the state before
them and their inputs. The next step first applies the rows that have not been removed (layouts/states.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.formats.layouts.arena import round_up
from llmrun.formats.layouts.states import REPLAY_ROWS

_FLOAT = 4
_LANES = 16


@dataclass(frozen=True, slots=True)
class ConvolutionState:
    """The last inputs of a causal convolution with `width` features. Each row depends on `taps` positions.

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
    """A matrix per head, and two replay buffers (layouts/states.py).

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
