"""The tile shapes of the linear kernel. A shape is a number of output groups and a number of rows."""

from __future__ import annotations

# Shapes are (groups of 16 outputs, rows). In a tile of 2 x 4, two groups share each load of activations, four rows
# share each load of weights, and the 8 integer and 8 float sums fit into 32 registers. This table shows how much of the
# peak multiply-add rate a tile reaches (one thread, 2,048 and 8,192 columns, two runs):
#
#            Q4_0        Q5_K        Q6_K
#   2 x 4    71 to 75 %  64 to 68 %  61 to 64 %
#   2 x 6    69 to 75 %  63 to 65 %  55 to 60 %
#
# The upper bound is 80 %, because a block of a tile has 80 instructions that need a multiplier, and only 64 of them are
# integer products.
_WIDE = (2, 4)
# This shape is for instruction-set levels with 16 registers of 32 bytes. With AVX-VNNI, 1 x 2, 1 x 4 and 2 x 2 are
# equally fast, and 2 x 4 is 40 % slower. With AVX2, the best of these shapes depends on the weight type.
_NARROW = (1, 2)

MOST_GROUPS = 2

# With at least this many rows, weights are unpacked once for all rows. This table shows billions of multiply-adds per
# second for a 60,000 x 2,048 Q4_0 matrix on 2 threads:
#
#   rows                12   16   20   32
#   not unpacked       284  351  358  374
#   unpacked once      255  350  399  480
MANY_ROWS = 16


def tile_shape(level: str) -> tuple[int, int]:
    """Return the tile shape for an instruction-set level as (groups of 16 outputs, rows)."""
    return _WIDE if level == "avx512vnni" else _NARROW
