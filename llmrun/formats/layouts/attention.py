"""Sizes shared by the attention kernels and their callers. Importing this file does not load the compiler."""

from __future__ import annotations

from typing import Final, NamedTuple

CHUNK: Final = 128  # positions per softmax step

SPLIT_ROWS: Final = 32  # steps of at most this many rows are split over chunks

# Queries per tile. With AVX-512, 8 queries of two vectors each take up 16 of the 32 registers. With AVX2, a vector
# takes up two of the 16 registers, and 6 queries of one vector each take up 12 of them.
_TILE_QUERIES: Final = {"avx512vnni": 8}
_NARROW_TILE_QUERIES: Final = 6
_MOST_QUERIES = max(*_TILE_QUERIES.values(), _NARROW_TILE_QUERIES)


class TileShape(NamedTuple):
    """The queries of a full tile: `heads` heads that share a KV head, of `rows` rows.

    tiles  number of tiles for the heads of a group. The last one begins early enough to be full.
    """

    heads: int
    rows: int
    tiles: int


def tile_shape(level: str, group: int) -> TileShape:
    """Return the tile shape for `group` query heads that share a KV head."""
    most = _TILE_QUERIES.get(level, _NARROW_TILE_QUERIES)
    tiles = -(-group // most)
    heads = -(-group // tiles)
    return TileShape(heads, most // heads, tiles)


def tile_vectors(level: str, queries: int) -> int:
    """Return the number of accumulator vectors per query, 1 or 2.

    With AVX2, LLVM spills accumulators if 3 queries have two vectors each.
    """
    return 2 if level in _TILE_QUERIES or 3 * queries <= _NARROW_TILE_QUERIES else 1


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
