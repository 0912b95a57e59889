"""The values that ops pass to each other, and the state of a NumPy run of a plan on a single sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.base.types import IMAGE_ROW
from llmrun.formats.quants.registry import BY_NAME
from llmrun.model.plan.elementary import Pairing, Rope
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.shapes import LayerKV, Reach
from llmrun.model.plan.stored_kv import Stored

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows(StrEnum):
    """The rows that a value contains."""

    ALL = "all"  # every row of the step
    WANTED = "wanted"  # only the rows whose logits or hidden states are requested, those with logits first
    SCORED = "scored"  # only the rows whose logits are requested
    CHOSEN = "chosen"  # one copy of each row per expert that the row is routed to


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A float32[rows, width] array.

    If the rows are CHOSEN, `copies` is the number of experts that each row is routed to.
    """

    width: int
    rows: Rows = Rows.ALL
    copies: int = 1

    def like(self, width: int) -> Value:
        """Create another value of the given width with the same rows."""
        return Value(width, self.rows, self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts that each row is routed to, most probable first, and their weights.

    Each row is routed to `used` of the `experts` experts.
    """

    experts: int
    used: int


Multiply = Callable[[Matrix, "NDArray[np.float32]"], "NDArray[np.float32]"]


class ImageInputs(NamedTuple):
    """The images of a run, as in Batch.

    embeds    float32[images' rows, row width]
    rope_pos  int32[rows, 3], or None without M-RoPE
    ahead     int32[rows], or None for causal images
    """

    embeds: NDArray[np.float32]
    rope_pos: NDArray[np.int32] | None = None
    ahead: NDArray[np.int32] | None = None


class Run:
    """One run of a plan on a single sequence.

    tokens    int32[rows]; IMAGE_ROW stands for the rows of images, for which tables supply the row of token 0
    multiply  computes x . matrix for x float32[rows, columns]
    kv_type   the type to which keys and values are rounded, or None to keep them in float32
    scales    float32[tokens, adapters]: the scale of each LoRA adapter for each token, or None if no token uses any
    images    the rows of images, or None if there are none
    looks_ahead  returns whether rows of images look ahead in layers with this reach
    """

    def __init__(
        self,
        ropes: Sequence[Rope],
        tokens: NDArray[np.int32],
        multiply: Multiply,
        kv_type: str | None,
        scales: NDArray[np.float32] | None = None,
        images: ImageInputs | None = None,
        looks_ahead: Callable[[Reach], bool] = lambda reach: True,
    ) -> None:
        self.tokens, self.multiply, self.kv_type, self.scales = np.maximum(tokens, 0), multiply, kv_type, scales
        self.images, self.image_rows = images, np.flatnonzero(tokens == IMAGE_ROW)
        self._looks_ahead = looks_ahead
        positions = np.arange(len(tokens), dtype=np.int32)
        if images is not None and images.rope_pos is not None:
            positions = images.rope_pos
        self._rotations = [rope.in_context(len(tokens)).rotations(positions) for rope in ropes]
        self._pairings = [rope.pairing for rope in ropes]
        self.values: dict[Value, NDArray[np.float32]] = {}
        self.keys_values: dict[LayerKV, tuple[Stored, Stored]] = {}
        self.routed: dict[Routing, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def rows_of(self, table: Matrix, indices: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
        """Look up rows of a table, float32[rows, columns]: each token's, or those with these indices."""
        return dequantized(table)[self.tokens if indices is None else indices]

    def parts(self, value: Value, groups: int) -> NDArray[np.float32]:
        """Split a value into float32[rows, groups, width of a group]."""
        x = self.values[value]
        return x.reshape(len(x), groups, -1)

    def heads(self, value: Value, head_size: int) -> NDArray[np.float32]:
        """Split a value into float32[rows, heads, head size]."""
        return self.parts(value, value.width // head_size)

    def put_parts(self, value: Value, parts: NDArray[np.float32]) -> None:
        """Set a value from its parts, float32[rows, groups, width of a group], by flattening each row."""
        self.values[value] = parts.reshape(len(parts), -1)

    def seen_from(self, position: int, reach: Reach) -> slice:
        """Return the positions that the row at a position attends to."""
        seen = reach.seen_from(position, len(self.tokens))
        if self.images is None or self.images.ahead is None or not self._looks_ahead(reach):
            return seen
        return slice(seen.start, max(seen.stop, position + 1 + int(self.images.ahead[position])))

    def rotation(self, rope: int) -> tuple[NDArray[np.float32], Pairing]:
        """Return the rotations float32[rows, pairs, 2] of one of the plan's ropes, and its pairing."""
        return self._rotations[rope], self._pairings[rope]


def dequantized(matrix: Matrix) -> NDArray[np.float32]:
    """Return the weights of a matrix as float32[rows, columns]."""
    dequantize = BY_NAME[matrix.kind.upper()].dequantize
    assert dequantize is not None
    return dequantize(matrix.read())
