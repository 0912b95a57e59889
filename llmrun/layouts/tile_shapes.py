"""How many groups of outputs and rows a tile of the linear kernel has."""

from __future__ import annotations

# (groups of 16 outputs, rows). A product needs a weight and an activation: two groups share each load of activations,
# four rows each load of weights, and 8 integer and 8 float sums fit 32 registers. 2,048 and 8,192 columns, one thread,
# twice, percent of the most products a second for Q4_0, Q5_K and Q6_K: 2 x 4 71 to 75, 64 to 68, 61 to 64; 2 x 6 69 to
# 75, 63 to 65, 55 to 60. Of the 80 instructions of a tile's block that need a multiplier 64 are integer products: 80 %
# is the bound.
_WIDE = (2, 4)
# 16 registers of 32 bytes: with AVX-VNNI 1 x 2, 1 x 4 and 2 x 2 were equal, and 2 x 4 two fifths slower; with AVX2 the
# best of them was another for each type.
_NARROW = (1, 2)

MOST_GROUPS = 2

# From so many rows on weights are unpacked for all of them. 60,000 x 2,048 of Q4_0, G products/s on 2 threads, by the
# row and unpacked: 12 rows 284 and 255, 16 rows 351 and 350, 20 rows 358 and 399, 32 rows 374 and 480.
MANY_ROWS = 16


def tile_shape(level: str) -> tuple[int, int]:
    """(groups of 16 outputs, rows)."""
    return _WIDE if level == "avx512vnni" else _NARROW
