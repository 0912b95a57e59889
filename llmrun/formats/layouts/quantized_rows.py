"""The layout of quantized activations, which matrix products with integer weights read.

A row is an array of blocks of 32 columns. A kernel needs only one address for each row, so the addresses of several
rows fit into registers. With separate arrays for integers, scales and sums, steps of 1 to 8 rows took 4 to 6 % longer
with AVX2 (SmolLM2 on a Xeon, 2 threads). With AVX-512, there was no clear difference.

Blocks are not padded to a cache line: with 64 bytes per block, a prefill of 256 tokens with a 1.24B model took 2 %
longer.
"""

from __future__ import annotations

from llmrun.formats.quants.packed import BLOCK_COLUMNS

INTEGERS = 0  # int8[32]
SCALE = 32  # float32: the value of an integer is scale x integer
OFFSET = 36  # int32: -8 x the sum of the integers, which corrects a zero point of 8, as in Q4_0
SUM = 40  # float32: scale x the sum of the integers
FIRST_HALF = 44  # int32: -1 x the sum of the first 16 integers
BLOCK_BYTES = 48


def row_bytes(width: int) -> int:
    """Return the size in bytes of a quantized row of `width` columns, a multiple of 32."""
    return width // BLOCK_COLUMNS * BLOCK_BYTES
