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
# This shape is for levels with 16 registers of 32 bytes, where dots.emit_in_order keeps the integer sums in registers.
# The table shows nanoseconds per block of 16 x 32 weights with 32 rows, with AVX2 and one thread:
#
#            Q4_0  Q4_K  Q6_K  Q8_0
#   1 x 2     175   182   289   305
#   1 x 3     156   164   248   345
#   1 x 4     165   153   237   270
_NARROW = (1, 4)
#
# On Arm, a block of a tile of 1 x 2 has 111 instructions with `smmla` (158 with `sdot`), and no vector is spilled. A
# tile of 1 x 4 with `smmla` has 228, and spills 31 vectors. These are counts for Q4_0, not measurements.
_NARROWEST = (1, 2)

MOST_GROUPS = 2

# The numbers of rows in a tile whose weights are read from the planes: the larger tile, and the smaller one for the
# rows that are left. The table shows milliseconds per step of a 1.24B model on a Xeon with AVX-512 and 2 threads:
#
#   rows      1     2     4     8    16
#   Q4_0     29    30    31    37    67
#   Q4_K_M   30    31    33    40    75
#   Q8_0     47    50    51    54    82
#
# With AVX2, more than 4 rows do not fit into the registers.
_FEW_WIDE = (8, 4)
_FEW_NARROW = (4, 2)

# With at least this many rows, weights are unpacked once for all rows. The table shows nanoseconds per block of 16 x 32
# weights, with AVX2 and one thread, unpacked for every 4 rows and once:
#
#   rows     Q4_0       Q4_K       Q6_K       Q8_0
#   12     62 and 70  65 and 65  122 and 99   99 and 110
#   16     83 and 88  86 and 82  163 and 126  133 and 143
#   24   124 and 126  129 and 117  244 and 181  201 and 206
#
# With AVX-512 and the model above, in milliseconds per step, unpacked for every 8 rows and once (slower up to 39 rows):
#
#   rows      Q4_0       Q4_K_M       Q8_0
#   24    106 and 129  118 and 141
#   32    138 and 154  156 and 165  150 and 175
#   36    153 and 170  170 and 175
#   39    168 and 193  185 and 201
_MANY_NARROW = 16
_MANY_WIDE = 40


def tile_shape(level: str) -> tuple[int, int]:
    """Return the tile shape for an instruction-set level as (groups of 16 outputs, rows)."""
    if level == "avx512vnni":
        return _WIDE
    return _NARROW if level in ("avxvnni", "avx2") else _NARROWEST


def few_row_tiles(level: str) -> tuple[int, int]:
    """Return the numbers of rows in the larger and in the smaller tile for steps of few rows."""
    return _FEW_WIDE if level == "avx512vnni" else _FEW_NARROW


def many_rows(level: str) -> int:
    """Return the number of rows from which on weights are unpacked once for all rows of a step."""
    return _MANY_WIDE if level == "avx512vnni" else _MANY_NARROW
