"""How many groups of outputs and rows a tile of the linear kernel has, and the memory its panels take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.kernels.packed_types import BLOCK_COLUMNS, PACKED_TYPES

if TYPE_CHECKING:
    from llmrun.kernels.weights import Matrix

# (groups of 16 outputs, rows). A product needs a weight and an activation: two groups share each load of activations,
# four rows each load of weights, and 8 integer and 8 float sums fit 32 registers. 2,048 to 8,192 columns on one thread,
# percent of the most products a second for Q4_0, Q5_K and Q6_K: 2 x 4 72 to 75, 67, 64; 2 x 6 70, 64, 57. Of the
# 80 instructions of a tile's block that need a multiplier 64 are integer products: 80 % is the bound.
_WIDE = (2, 4)
# 16 registers of 32 bytes: 1 x 2, 1 x 4 and 2 x 2 were equal within the noise, 2 x 4 a third slower.
_NARROW = (1, 2)
_SHAPES = {"avx512vnni": _WIDE, "avxvnni": (1, 4)}

MOST_GROUPS = 2


def tile_shape(level: str) -> tuple[int, int]:
    """(groups of 16 outputs, rows)."""
    return _SHAPES.get(level, _NARROW)


def panel_bytes(matrix: Matrix) -> int:
    """Of all the panels a thread needs at once."""
    return MOST_GROUPS * matrix.columns // BLOCK_COLUMNS * PACKED_TYPES[matrix.packed].panel_block_bytes
