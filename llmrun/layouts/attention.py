"""Sizes shared by the attention kernels and their callers. Importing this file does not load the compiler."""

from __future__ import annotations

from typing import Final

CHUNK: Final = 128  # positions per softmax step
SEES_ALL: Final = 1 << 40  # means "no window" when used as a window size; larger than any context

# Queries per tile. Each query needs two accumulator vectors, so with AVX-512, 8 queries take up 16 of the 32 registers.
# At instruction-set levels with only 16 registers, where a vector takes up two of them, 2 queries take up half of them.
TILE_QUERIES: Final = {"avx512vnni": 8}
NARROW_TILE_QUERIES: Final = 2
_MOST_QUERIES = max(*TILE_QUERIES.values(), NARROW_TILE_QUERIES)


def state_floats(value_size: int) -> int:
    """Return how many floats are in the state of one query.

    The state consists of the weighted sum of the values and a vector with the maximum score and the sum of the weights.
    """
    return value_size + 16


def scratch_bytes(head_size: int, value_size: int) -> int:
    """Return the scratch memory that one thread needs, in bytes.

    For every query of a tile, the scratch memory holds the weights of a chunk, the same weights times the scales of the
    values, the state of the chunk, and the state of all chunks before it. While keys are stored, it holds one rotated
    key instead.
    """
    return 4 * max(_MOST_QUERIES * (2 * CHUNK + 2 * state_floats(value_size)), head_size)
