"""Sizes that the attention kernels and those who call them must agree on. Imports nothing, so that a caller need not
load the compiler."""

from __future__ import annotations

from typing import Final

CHUNK: Final = 128  # positions whose scores are weighed at once
SEES_ALL: Final = 1 << 40  # positions in the window of a row that has none: more than there are

# Queries of a tile, whose accumulators are two vectors each: 16 of 32 registers. Where a vector takes two registers of
# 16, two queries take half of them.
TILE_QUERIES: Final = {"avx512vnni": 8}
NARROW_TILE_QUERIES: Final = 2
_MOST_QUERIES = max(*TILE_QUERIES.values(), NARROW_TILE_QUERIES)


def state_floats(value_size: int) -> int:
    """Of what is known of one query: weighted values, then the largest score and the sum of weights in a vector."""
    return value_size + 16


def scratch_bytes(head_size: int, value_size: int) -> int:
    """Of one thread: for each query of a tile a chunk's weights, those times the values' scales, its state and that of
    all chunks before; or a key on its way into the cache."""
    return 4 * max(_MOST_QUERIES * (2 * CHUNK + 2 * state_floats(value_size)), head_size)
