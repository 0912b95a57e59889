"""The layout of quantized activations, which matrix products with integer weights read.

A row is a sequence of records, one for each block of 32 columns. A record is one cache line, so a kernel that reads
several rows needs only one address for each of them. With AVX2, separate arrays for integers, scales and sums made steps
of 1, 2, 4 and 8 rows slower by 4, 4, 5 and 6 % (SmolLM2 on a Xeon, 2 threads), because their addresses did not fit into
the registers. With AVX-512 it made little difference: 0 to 2 % for few rows, and a prefill of 256 tokens with a 1.24B model
was 1 to 3 % faster.
"""

from __future__ import annotations

INTEGERS = 0  # int8[32]
SCALE = 32  # float32: the value of an integer is scale x integer
OFFSET = 36  # int32: -8 x the sum of the integers
SUM = 40  # float32: scale x the sum of the integers
HALF_SUMS = 44  # int32[2]: the negated sum of the integers in each half
RECORD_BYTES = 64


def row_bytes(width: int) -> int:
    """Return the size in bytes of a quantized row of `width` columns, a multiple of 32."""
    return width // 32 * RECORD_BYTES
