"""The packed forms of all weight types, the layout of quantized activations, and the tile shapes of the linear kernel.

Each type's module in quants/ defines its packed form. Integer types without a packed form are stored as "wide", with
one byte per weight. This is exact, but it takes up more memory than the file.

A row of quantized activations is an array of blocks of 32 columns. A kernel needs only one address for each row, so the
addresses of several rows fit into registers. With separate arrays for integers, scales and sums, steps of 1 to 8 rows
took 4 to 6 % longer with AVX2 (SmolLM2 on a Xeon, 2 threads). With AVX-512, there was no clear difference.

Blocks are not padded to a cache line: with 64 bytes per block, a prefill of 256 tokens with a 1.24B model took 2 %
longer.
"""

from __future__ import annotations

from llmrun.formats.quants.registry import BY_ID
from llmrun.formats.quants.weight_type import BLOCK_COLUMNS, PackedType, Scales

WIDE = "wide"
WIDE_BYTES = 40  # size of 32 columns: two float32 scales, and an int8 for each column

_READABLE = [type_ for type_ in BY_ID.values() if type_.dequantize is not None]

PACKED_TYPES = {type_.name.lower(): type_.packed for type_ in _READABLE if type_.packed is not None}
PACKED_TYPES[WIDE] = PackedType((8,), scales=Scales.F32, sub_columns=16)
WIDENED_TYPES = frozenset(type_.name.lower() for type_ in _READABLE if type_.unpack and type_.packed is None)

# Unpacked types and their size in bytes per weight.
FLOAT_BYTES = {type_.name.lower(): type_.block_bytes for type_ in _READABLE if type_.unpack is None}


def packed_name(kind: str) -> str:
    """Return the key in PACKED_TYPES for a weight type's lower-case name."""
    return WIDE if kind in WIDENED_TYPES else kind


INTEGERS = 0  # int8[32]
SCALE = 32  # float32: the value of an integer is scale x integer
OFFSET = 36  # int32: -8 x the sum of the integers, which corrects a zero point of 8, as in Q4_0
SUM = 40  # float32: scale x the sum of the integers
FIRST_HALF = 44  # int32: -1 x the sum of the first 16 integers
BLOCK_BYTES = 48


def quantized_row_bytes(width: int) -> int:
    """Return the size in bytes of a quantized row of `width` columns, a multiple of 32."""
    return width // BLOCK_COLUMNS * BLOCK_BYTES


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
