"""The layouts of the paged KV cache and of recurrent states, the types of keys and values, and attention's tile sizes.

Importing this file loads neither NumPy nor the compiler. The types, in the notation of --kv-type, are:

    f16    16 bits per element
    q8_0   8 bits and a float16 scale per group of 32 elements: 53 % of the memory of f16
    q4_0   4 bits and a float16 scale per group of 32 elements: 28 %

Elements of 4 bits are indices into the table of IQ4_NL, whose 16 values are closer together near zero
(quants/table_quants.py). Scaled types are rotated by a Hadamard matrix before they are rounded (plan/stored_kv.py).
Keys and values may have different types: `q8_0:q4_0` stands for keys in q8_0 and values in q4_0.

The cache of a layer is an array of blocks of 32 positions. Entry i of a row's block table is the index of the block for
positions 32i to 32i + 31. Within a block, each KV head has these arrays (`HeadLayout` contains their offsets):

    keys    elements [head size, 32], their scales float16[groups, 32]
    values  elements [32, value size], their scales float16[groups, 32]

With this order, both matrix products of attention use whole vectors, with one position per element for keys and one
feature per element for values.

Elements are float16, int8 or 4-bit indices, and float16 elements have no scales. Two indices share a byte. In keys,
byte [i, p] holds features 2i (low half) and 2i + 1 (high half) of position p, so that rows of different positions never
write to the same byte. In values, 8 bytes hold 16 consecutive features: byte j holds features j and j + 8.

Elements of 8 bits are multiplied as integers, four at a time, so four of them are adjacent:

    keys    int8[head size / 4, 32, 4]: 4 features of each position
    values  for each group of features, int8[8, features of the group, 4]: 4 positions of each feature

A group is 32 consecutive features of one position. If the head size is not a multiple of 32, the last group has 16
features. A number is its integer, or the table's entry for its index, times the scale of its group.
plan/stored_kv.py defines how numbers are rounded.

Recurrent states: the state that is stored for a sequence is the one after its first `base` rows. The rows from the base
to the end of the sequence can still be removed. Their inputs are in a replay buffer, and the next step applies the
inputs of the remaining rows to the state before it runs its own rows. In this way, rejecting a draft costs nothing.

A run is the rows of one sequence in a step, described by int64[8] (`RUN_*`). Each run commits the state at one
position, which becomes the new base: anywhere from the old base to the position after the last row.

A sequence has two replay buffers. A step reads rows from one of them and writes its rows after the new base to the
other, so that no thread overwrites rows that another one still needs.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from llmrun.base.sampling_texts import ListOfTexts

REPLAY_ROWS: Final = 16  # the most rows that can be removed without a checkpoint: a draft, or the end of a prompt

RUN_WORDS: Final = 8
_WORD: Final = 8
RUN_BYTES: Final = RUN_WORDS * _WORD
RUN_FIRST: Final = 0 * _WORD  # index of the run's first row in the list of rows (STEP_RUN_ROWS)
RUN_ROWS: Final = 1 * _WORD  # number of rows
RUN_SEQUENCE: Final = 2 * _WORD  # index of the sequence's state
RUN_BASE: Final = 3 * _WORD  # the base before the step
RUN_START: Final = 4 * _WORD  # position of the first row
RUN_COMMIT: Final = 5 * _WORD  # the base after the step
RUN_BUFFER: Final = 6 * _WORD  # index of the replay buffer to read; the other one is written

GROUP: Final = 32  # features that share a scale

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVType:
    """The form in which the cache stores keys or values.

    bits        size of an element
    has_scales  whether elements are rotated and share a scale per group of GROUP features
    """

    name: str
    bits: int
    has_scales: bool

    def n_bytes(self, elements: int) -> int:
        """Return the size of an even number of elements without their scales."""
        return self.bits * elements // 8

    def scale_bytes(self, size: int) -> int:
        """Return the size of the scales of one key or value of `size` features."""
        return _SCALE_BYTES * n_groups(size) if self.has_scales else 0

    def position_bytes(self, size: int) -> int:
        """Return the size of one key or value of `size` features, with its scales."""
        return self.n_bytes(size) + self.scale_bytes(size)


F16: Final = KVType("f16", 16, has_scales=False)
Q8_0: Final = KVType("q8_0", 8, has_scales=True)
Q4_0: Final = KVType("q4_0", 4, has_scales=True)
KV_TYPES: Final = {kind.name: kind for kind in (F16, Q8_0, Q4_0)}

_SEPARATOR = ":"


class KeysValues(NamedTuple):
    """The types of keys and values, as in `--kv-type q8_0:q4_0`."""

    keys: KVType
    values: KVType

    def __str__(self) -> str:
        """Return the shortest text that stands for these types."""
        return _SEPARATOR.join(dict.fromkeys(kind.name for kind in self))

    def position_bytes(self, head_size: int, value_size: int) -> int:
        """Return the size of the key and value of one head at one position."""
        return self.keys.position_bytes(head_size) + self.values.position_bytes(value_size)


@functools.lru_cache(maxsize=64)
def parse_kv_type(text: str) -> KeysValues:
    """Return the types that a text such as "q8_0" or "q8_0:q4_0" stands for. Raises ValueError with an unknown name."""
    names = text.split(_SEPARATOR)
    if len(names) > len(KeysValues._fields):
        raise ValueError(text)
    unknown = [name for name in names if name not in KV_TYPES]
    if unknown:
        raise ValueError(unknown[0])
    return KeysValues(KV_TYPES[names[0]], KV_TYPES[names[-1]])


def _advice(text: str) -> str:
    """Return the valid text that was probably meant, as for "q8" or "q8_0,q4_0"."""
    words = [word for word in re.split(r"[^a-z0-9_]+", text.lower()) if word]
    meant = [kind for word in words for kind in KV_TYPES.values() if kind.name.startswith(word)]
    if len(meant) != len(words) or not 1 <= len(words) <= len(KeysValues._fields):
        return ""
    return f"did you mean {KeysValues(meant[0], meant[-1])}?"


KV_TYPE: Final = ListOfTexts(
    lambda text: [kind.name for kind in parse_kv_type(text)],
    f"{', '.join(KV_TYPES)}, or a pair for keys and values, as in {KeysValues(Q8_0, Q4_0)}",
    _advice,
)
KV_CHOICES: Final = (
    *KV_TYPES,
    *(str(KeysValues(keys, values)) for keys in KV_TYPES.values() for values in KV_TYPES.values() if keys != values),
)


def n_groups(size: int) -> int:
    return -(-size // GROUP)


BLOCK: Final = 32  # positions in a block
QUAD: Final = 4  # int8 products that an integer dot-product instruction adds up


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The offsets and sizes in bytes of one KV head's arrays in a block. Keys start at offset 0.

    keys, values  the types of the elements
    head_size     features of a key, a multiple of 16
    value_size    features of a value, a multiple of 16
    """

    keys: KVType
    values: KVType
    head_size: int
    value_size: int

    @property
    def key_scales(self) -> int:
        return self.keys.n_bytes(self.head_size * BLOCK)

    @property
    def values_at(self) -> int:
        return BLOCK * self.keys.position_bytes(self.head_size)

    @property
    def value_scales(self) -> int:
        return self.values_at + self.values.n_bytes(self.value_size * BLOCK)

    @property
    def n_bytes(self) -> int:
        return self.values_at + BLOCK * self.values.position_bytes(self.value_size)

    @property
    def row_features(self) -> int:
        """The number of features of each position in one row of keys."""
        return {16: 1, 8: QUAD, 4: 2}[self.keys.bits]

    @property
    def key_row_bytes(self) -> int:
        return self.keys.n_bytes(self.row_features * BLOCK)


CHUNK: Final = 128  # positions per softmax step

SPLIT_ROWS: Final = 32  # steps of at most this many rows are split over chunks
# The most rows of such a step that share a chunk. A larger number would leave too few items for many threads.
SHARING_ROWS: Final = 8

# Queries per tile. With AVX-512, 8 queries of two vectors each take up 16 of the 32 registers. With AVX2, a vector
# takes up two of the 16 registers, and 6 queries of one vector each take up 12 of them. Besides accumulators, integer
# products need fewer registers than float products with AVX-512, and more with AVX2.
_TILE_QUERIES: Final = {"avx512vnni": 8}
_NARROW_TILE_QUERIES: Final = 6
_INTEGER_TILE_QUERIES: Final = {"avx512vnni": 12, "avx2": 4}
_MOST_QUERIES: Final = 12


class TileShape(NamedTuple):
    """The queries of a full tile: `heads` heads that share a KV head, of `rows` rows.

    tiles  number of tiles for the heads of a group. The last one begins early enough to be full.
    """

    heads: int
    rows: int
    tiles: int


def tile_shape(level: str, layout: HeadLayout, group: int) -> TileShape:
    """Return the tile shape for `group` query heads that share a KV head."""
    most = _TILE_QUERIES.get(level, _NARROW_TILE_QUERIES)
    if layout.keys is layout.values is Q8_0:
        most = _INTEGER_TILE_QUERIES.get(level, most)
    tiles = -(-group // most)
    heads = -(-group // tiles)
    return TileShape(heads, min(most // heads, SHARING_ROWS), tiles)


def tile_vectors(level: str, queries: int) -> int:
    """Return the number of accumulator vectors per query, 1 or 2.

    With AVX2, LLVM spills accumulators if 3 queries have two vectors each.
    """
    return 2 if level in _TILE_QUERIES or 3 * queries <= _NARROW_TILE_QUERIES else 1


def state_floats(value_size: int) -> int:
    """Return how many floats are in the state of one query.

    The state consists of the weighted sum of the values and a vector with the maximum score, the sum of the weights,
    and the unit of integer weights (`step_offset`).
    """
    return value_size + 16


def step_offset(value_size: int) -> int:
    """Return the offset in a state of a float32: the value of one unit of the integer weights."""
    return 4 * value_size + 8


SPAN_QUERIES: Final = SHARING_ROWS * _MOST_QUERIES  # the most queries that share each read of a chunk


@dataclass(frozen=True, slots=True)
class Scratch:
    """The offsets and sizes in bytes of one thread's scratch memory for attention.

    queries   for each query of a span, its integers (see `query_bytes`)
    merged    for each query of a span, the state of all chunks so far
    weights   float32[2, queries of a tile, CHUNK]: the weights of a chunk, then the same weights times the scales of
              the values, as integers if the values are int8
    later     for each query of a tile, the state of a chunk
    scales    float32[groups of a value + 2, CHUNK]: the scales of a chunk's values, the largest scale of each position,
              and NaN for positions with a scale that is not finite, 0 for others; then the sum of these flags,
              float32

    While keys and values are stored, the scratch memory holds one rotated key or value instead.
    """

    head_size: int
    value_size: int

    @property
    def query_bytes(self) -> int:
        """The size of one query: int8[head size], int32[groups] and float32[groups], rounded up to 64 bytes."""
        return -(-(self.head_size + 8 * n_groups(self.head_size)) // 64) * 64

    @property
    def state_bytes(self) -> int:
        return 4 * state_floats(self.value_size)

    @property
    def merged(self) -> int:
        return SPAN_QUERIES * self.query_bytes

    @property
    def weights(self) -> int:
        return self.merged + SPAN_QUERIES * self.state_bytes

    @property
    def later(self) -> int:
        return self.weights + 2 * 4 * _MOST_QUERIES * CHUNK

    @property
    def scales(self) -> int:
        return self.later + _MOST_QUERIES * self.state_bytes

    @property
    def n_bytes(self) -> int:
        return self.scales + 4 * CHUNK * (n_groups(self.value_size) + 2) + 64
