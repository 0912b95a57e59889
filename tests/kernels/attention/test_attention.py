"""Tests of RoPE, the cache layout and attention over the cache, against NumPy at every instruction level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lowering import float_word
from llmrun.backends.cpu.ops.rope import rotation_words
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.formats.layouts.kv import (
    BLOCK,
    CHUNK,
    KV_TYPES,
    Q4_0,
    Q8_0,
    SPLIT_ROWS,
    KeysValues,
    KVType,
    Scratch,
    parse_kv_type,
    state_floats,
)
from llmrun.formats.quants.table_quants import IQ4_VALUES as IQ4_NL
from llmrun.model.plan.elementary import Pairing, Rope, rotations_of
from llmrun.model.plan.ops.attention import LARGEST_WEIGHT, AttentionWords, MergeWords, attention_reference
from llmrun.model.plan.ops.rope import RopeWords, rope_reference
from llmrun.model.plan.shapes import AttentionShape, Reach, seen_ranges
from llmrun.model.plan.stored_kv import (
    Stored,
    enter_reference,
    hadamard_reference,
    key_parts,
    read_factor,
    rotated_back_reference,
    store_reference,
    stored_factor,
    value_parts,
)
from tests.support.kernels.runs import LEVELS_HERE, run_kernel

OWN = Reach(0, 0)
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)


class Cache:
    """The cache of one layer, with the blocks of one sequence in shuffled order."""

    sequences: Sequence[int] = ()  # the sequence of each row of a step, if there are several sequences

    def __init__(self, shape: AttentionShape, positions: int, kv_type: str = "f16") -> None:
        self.shape, (self.keys, self.values) = shape, parse_kv_type(kv_type)
        n_blocks = -(-positions // BLOCK)
        self.block_bytes = self.shape.block_bytes(kv_type)
        self.memory = allocate(n_blocks * self.block_bytes, "a test's cache").reshape(n_blocks, -1)
        self.table = np.random.default_rng(5).permutation(n_blocks).astype(np.int32)

    def read(self, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (keys, values), each float32[length, KV heads, size], with values rotated back."""
        keys, values = self.stored(length)
        return keys.read(), rotated_back_reference(values.read(), self.values)

    def stored(self, length: int) -> tuple[Stored, Stored]:
        """Return (keys, values), read according to the documented layout.

        Each block and head holds keys [head size, 32], then values [32, value size]. Scales [groups, 32], if any,
        follow the keys or values. Keys of 8 bits are [head size / 4, 32, 4], and each group of 32 features of values of
        8 bits is [8, features, 4].
        """
        blocks = [self._block(block) for block in self.table]
        keys, key_scales, values, value_scales = (np.concatenate(part)[:length] for part in zip(*blocks, strict=True))
        return (
            Stored(keys, key_scales if self.keys.has_scales else None),
            Stored(values, value_scales if self.values.has_scales else None),
        )

    def _block(self, block: int) -> tuple[NDArray[np.float32], ...]:
        """Return the keys, their scales, the values and their scales of one block, float32[32, KV heads, ...]."""
        heads = self.memory[block].reshape(self.shape.kv_heads, -1)
        sizes = (self.keys, self.shape.head_size), (self.values, self.shape.value_size)
        n_bytes = [BLOCK * _position_bytes(kind, size) for kind, size in sizes]
        assert heads.shape[1] == sum(n_bytes)
        parts = np.split(heads, [n_bytes[0]], axis=1)
        (keys, key_scales), (values, value_scales) = (
            _elements(part, kind, size) for part, (kind, size) in zip(parts, sizes, strict=True)
        )
        if self.keys.bits == 4:
            pairs = keys.reshape(len(heads), -1, 1, BLOCK)
            keys = np.concatenate([pairs & 15, pairs >> 4], axis=2)
        if self.values.bits == 4:
            eights = values.reshape(len(heads), BLOCK, -1, 1, 8)
            values = np.concatenate([eights & 15, eights >> 4], axis=3)
        if self.keys.bits == 8:
            keys = keys.reshape(len(heads), -1, BLOCK, 4).swapaxes(2, 3)
        if self.values.bits == 8:
            groups = np.split(values, range(32 * BLOCK, values.shape[1], 32 * BLOCK), axis=1)
            fours = [group.reshape(len(heads), BLOCK // 4, -1, 4).swapaxes(2, 3) for group in groups]
            values = np.concatenate([four.reshape(len(heads), BLOCK, -1) for four in fours], axis=2)
        keys = _numbers(keys, self.keys).reshape(len(heads), -1, BLOCK).transpose(2, 0, 1)
        values = _numbers(values, self.values).reshape(len(heads), BLOCK, -1).swapaxes(0, 1)
        return keys, key_scales.swapaxes(0, 1), values, value_scales.swapaxes(0, 1)

    def check(
        self,
        actual: NDArray[np.float32],
        q: NDArray[np.float32],
        seen: Sequence[slice],
        tolerance: float = 2e-6,
        **more: Any,
    ) -> None:
        """Compare the results of rows with those of the NumPy twin. `seen` has the positions that each row attends to.

        Errors may be up to `tolerance` times the largest value. With values of 8 bits, a small error in a score may
        round a weight to another integer, which changes the sums of a group of features slightly. Fewer than a tenth of
        the results may have such an error.
        """
        keys, values = self.stored(max(part.stop for part in seen))
        read = rotated_back_reference(values.read(), self.values)
        types, scale = KeysValues(self.keys, self.values), self.shape.head_size**-0.5
        expected = [
            attention_reference(query, keys, values, types, part, scale, **more)
            for query, part in zip(q, seen, strict=True)
        ]
        largest = np.array([np.abs(read[part]).max() for part in seen])[:, None, None]
        errors = np.abs(actual - np.stack(expected)) / largest
        if self.values is Q8_0:
            assert errors.max() <= tolerance + 2 / LARGEST_WEIGHT
            assert (errors > tolerance).mean() < 0.1
        else:
            assert errors.max() <= tolerance

    def step(self, positions: NDArray[np.int32], rotations: NDArray[np.float32], reach: Reach = OWN) -> dict[int, int]:
        """Return the step's words; the layer's window and its reach are the second ones in its plan."""
        self._seen = seen_ranges([OWN, reach], positions, np.array(self.sequences or [0] * len(positions)))
        self._tables = np.zeros((2, len(positions)), np.int64)
        self._tables[1] = address_of(self.table)
        return {
            records.STEP_ROWS: len(positions),
            records.STEP_POSITIONS: address_of(positions),
            records.STEP_TABLES: address_of(self._tables),
            records.STEP_SEEN: address_of(self._seen),
            records.STEP_ROTATIONS: address_of(rotations),
        }

    def store(
        self,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        positions: NDArray[np.int32],
        ropes: Sequence[Rope] = (),
        rope: int | None = None,
        query_rope: int | None = None,
        *,
        level: str,
        threads: int = 1,
    ) -> NDArray[np.float32]:
        """Run rope_store on rows [rows, heads, size] and return the rotated queries.

        If `query_rope` is None, queries use the keys' rope.
        """
        rotated, rotations = np.full_like(q, np.nan), rotations_of(ropes, positions)
        scratch = self._scratch(threads)
        words = self._queries(q, rotated, ropes, rope if query_rope is None else query_rope)._replace(
            k=address_of(k),
            k_stride=k.strides[0],
            v=address_of(v),
            v_stride=v.strides[0],
            kv_heads=self.shape.kv_heads,
            key_rotation=rotation_words(ropes, rope).rotation,
            cache=address_of(self.memory),
            block_bytes=self.block_bytes,
            tables=1,
            scratch=address_of(scratch),
            scratch_bytes=scratch.strides[0],
        )
        sizes = {"head_size": self.shape.head_size, "value_size": self.shape.value_size}
        name = KernelName.of("attention.rope", "rope_store", **sizes, keys=self.keys.name, values=self.values.name)
        run_kernel(name, words, self.step(positions, rotations), level=level, threads=threads)
        return rotated

    def rotate(
        self, q: NDArray[np.float32], positions: NDArray[np.int32], ropes: Sequence[Rope], rope: int, *, level: str
    ) -> NDArray[np.float32]:
        """Rotate queries alone and return them."""
        rotated, rotations = np.full_like(q, np.nan), rotations_of(ropes, positions)
        name = KernelName.of("attention.rope", "rotate", head_size=self.shape.head_size, keys=self.keys.name)
        words = self._queries(q, rotated, ropes, rope)
        run_kernel(name, words, self.step(positions, rotations), level=level, threads=2)
        return rotated

    def _queries(
        self, q: NDArray[np.float32], rotated: NDArray[np.float32], ropes: Sequence[Rope], rope: int | None
    ) -> RopeWords:
        return RopeWords(
            q=address_of(q),
            q_stride=q.strides[0],
            out=address_of(rotated),
            out_stride=rotated.strides[0],
            heads=self.shape.heads,
            **rotation_words(ropes, rope)._asdict(),
        )

    def _scratch(self, threads: int) -> NDArray[np.float32]:
        n_bytes = Scratch(self.shape.head_size, self.shape.value_size).n_bytes
        return np.full((threads, n_bytes // 4), np.nan, np.float32)

    def attend(
        self,
        q: NDArray[np.float32],
        positions: NDArray[np.int32],
        *,
        level: str,
        threads: int = 1,
        window: int = 0,
        around: int | None = None,
        soft_cap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        size, value_size = self.shape.head_size, self.shape.value_size
        out = np.full((*q.shape[:2], value_size), np.nan, np.float32)
        scratch, partials = self._scratch(threads), self.partials()
        words = AttentionWords(
            q=address_of(q),
            q_stride=q.strides[0],
            out=address_of(out),
            out_stride=out.strides[0],
            cache=address_of(self.memory),
            block_bytes=self.block_bytes,
            kv_heads=self.shape.kv_heads,
            scale=float_word(size**-0.5),
            scratch=address_of(scratch),
            scratch_bytes=scratch.strides[0],
            partials=address_of(partials),
            partial_stride=partials.strides[0],
            slots=len(partials),
            tables=1,
            reach=1,
            sinks=0 if sinks is None else address_of(sinks),
            soft_cap=float_word(soft_cap),
        )
        sizes = {"head_size": size, "value_size": value_size, "group": self.shape.heads // self.shape.kv_heads}
        function = "capped_attention" if soft_cap else "attention"
        types = {"keys": self.keys.name, "values": self.values.name}
        name = KernelName.of("attention.attention", function, **sizes, **types)
        reach = replace(self.shape, window=window, around=around).reach
        step = self.step(positions, np.zeros((len(positions), 0, 2), np.float32), reach)
        run_kernel(name, words, step, level=level, threads=threads)
        merge = MergeWords(
            partials=words.partials,
            partial_stride=words.partial_stride,
            slots=words.slots,
            out=words.out,
            out_stride=words.out_stride,
            heads=self.shape.heads,
            scratch=words.scratch,
            scratch_bytes=words.scratch_bytes,
            reach=words.reach,
            sinks=words.sinks,
        )
        name = KernelName.of("attention.attention", "merge", value_size=value_size, values=self.values.name)
        run_kernel(name, merge, step, level=level)
        return out

    def partials(self) -> NDArray[np.float32]:
        n_chunks = -(-len(self.table) * BLOCK // CHUNK)
        return np.full(
            (SPLIT_ROWS * n_chunks, self.shape.heads * state_floats(self.shape.value_size)), np.nan, np.float32
        )


def _position_bytes(kind: KVType, size: int) -> int:
    groups = -(-size // 32)
    return {"f16": 2 * size, "q8_0": size + 2 * groups, "q4_0": size // 2 + 2 * groups}[kind.name]


def _elements(part: NDArray[np.uint8], kind: KVType, size: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return (elements [heads, elements or bytes], scales [heads, 32, groups]) of the keys or values of all heads."""
    dtype, n_bytes = {"f16": (np.float16, 2 * size), "q8_0": (np.int8, size), "q4_0": (np.uint8, size // 2)}[kind.name]
    elements = np.ascontiguousarray(part[:, : n_bytes * BLOCK]).view(dtype)
    if kind.name == "f16":
        return elements, np.ones((len(part), BLOCK, 1), np.float32)
    scales = np.ascontiguousarray(part[:, n_bytes * BLOCK :]).view(np.float16).astype(np.float32)
    return elements, scales.reshape(len(part), -1, BLOCK).transpose(0, 2, 1)


def _numbers(elements: NDArray[Any], kind: KVType) -> NDArray[np.float32]:
    return (IQ4_NL[elements] if kind.bits == 4 else elements).astype(np.float32)


def entered_reference(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], kv_type: str
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return (queries, keys, values) read back from the cache, with values rotated back, float32[..., size]."""
    queries, stored_keys, stored_values = enter_reference(queries, keys, values, kv_type)
    return queries, stored_keys.read(), rotated_back_reference(stored_values.read(), parse_kv_type(kv_type).values)


NINE, SIX, MANY = AttentionShape(9, 3, 64), AttentionShape(6, 6, 48), AttentionShape(22, 2, 16)
SHAPES = [
    *((shape, kv_type) for shape in (NINE, SIX, MANY) for kv_type in KV_TYPES),
    (AttentionShape(2, 1, 16), "f16"),
    (AttentionShape(4, 2, 48, value_size=32), "f16"),
    (AttentionShape(4, 1, 512), "f16"),
    (AttentionShape(16, 1, 576, value_size=512), "q8_0"),
    (AttentionShape(3, 3, 80), "q4_0"),
    (NINE, "q8_0:q4_0"),
    (AttentionShape(4, 2, 48, value_size=32), "q4_0:f16"),
    (AttentionShape(4, 2, 48, value_size=32), "f16:q8_0"),
    (AttentionShape(4, 2, 48, value_size=32), "q8_0:f16"),
]


def _name(value: str | AttentionShape) -> str:
    if isinstance(value, str):
        return value
    return f"{value.heads}/{value.kv_heads} {value.head_size}/{value.value_size}"


EVERY_SHAPE = pytest.mark.parametrize(
    ("level", "shape", "kv_type"), [(level, *kind) for level, kind in product(LEVELS_HERE, SHAPES)], ids=_name
)
EVERY_TYPE = pytest.mark.parametrize("kv_type", KV_TYPES)


@pytest.mark.parametrize("parts_of", [key_parts, value_parts])
@pytest.mark.parametrize("head_size", [16, 48, 64, 80, 96, 112, 128, 512, 576])
def test_rotated_keys_and_queries_have_the_same_products(
    head_size: int, parts_of: Callable[[int], tuple[int, ...]]
) -> None:
    random, parts = np.random.default_rng(head_size), parts_of(head_size)
    assert sum(parts) == head_size
    assert set(parts) <= {1 << bit for bit in range(4, 10)}
    q, k = (random.standard_normal((50, head_size)).astype(np.float32) for _ in range(2))
    rotated = hadamard_reference(q, parts, read_factor) * hadamard_reference(k, parts, stored_factor)
    np.testing.assert_allclose(rotated.sum(-1), (q * k).sum(-1), rtol=0, atol=1e-5 * head_size**0.5)
    back = hadamard_reference(hadamard_reference(k, parts, stored_factor), parts, read_factor)
    np.testing.assert_allclose(back, k, rtol=0, atol=1e-5)
    one_hot = np.zeros(head_size, np.float32)
    one_hot[5] = 100
    assert len(set(np.abs(hadamard_reference(one_hot, parts, stored_factor)[: parts[0]]))) == 1


def random_keys_and_values(
    shape: AttentionShape, rows: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random, sizes = np.random.default_rng(seed), (shape.head_size, shape.value_size)
    k, v = (random.standard_normal((rows, shape.kv_heads, size)).astype(np.float32) for size in sizes)
    return k, v


def filled(shape: AttentionShape, length: int, kv_type: str, *, level: str, scale: float = 1.0) -> Cache:
    """Return a cache that holds `length` random positions."""
    cache = Cache(shape, length, kv_type)
    q = np.zeros((length, shape.heads, shape.head_size), np.float32)
    k, v = (scale * part for part in random_keys_and_values(shape, length, length))
    positions = np.arange(length, dtype=np.int32)
    cache.store(q, k, v, positions, level=level)
    return cache


@pytest.mark.push
@EVERY_SHAPE
@pytest.mark.parametrize("partial", [False, True])
def test_rotated_queries_keys_and_values_equal_the_twin(
    level: str, shape: AttentionShape, kv_type: str, partial: bool
) -> None:
    """Rotation products are never fused and float16 rounds as in NumPy, so the bits are equal."""
    random = np.random.default_rng(shape.head_size)
    rows, pairs = 40, shape.head_size // 4 if partial else shape.head_size // 2
    positions, rope = np.arange(rows, dtype=np.int32), Rope(10_000.0 ** -(np.arange(pairs) / pairs))
    q = random.standard_normal((rows, shape.heads, shape.head_size)).astype(np.float32)
    k, v = random_keys_and_values(shape, rows, 1)
    cache = Cache(shape, rows, kv_type)
    rotated = cache.store(q, k, v, positions, [rope], 0, level=level, threads=3)
    rotations = rope.rotations(positions)
    keys, values = cache.read(rows)
    expected = entered_reference(rope_reference(q, rotations), rope_reference(k, rotations), v, kv_type)
    for actual, wanted in zip((rotated, keys, values), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


ROPES = [
    Rope(np.full(3, 0.4)),
    Rope(10_000.0 ** -(np.arange(32) / 32), Pairing.NEOX, magnitude=1.25),
    Rope(500.0 ** -(np.arange(21) / 21), Pairing.NEOX),
    Rope(10_000.0 ** -(np.arange(32) / 32), Pairing.NEOX, growth=(0.5, 3)),
]


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("number", [0, 1, 2, None])
def test_a_layer_takes_the_rotations_of_its_own_rope(level: str, kv_type: str, number: int | None) -> None:
    """Covers both pairings, rotation of some or all features of a head, no rope at all, and queries alone."""
    random = np.random.default_rng(8)
    q = random.standard_normal((11, 9, 64)).astype(np.float32)
    k, v = (random.standard_normal((11, 3, 64)).astype(np.float32) for _ in range(2))
    cache, positions = Cache(NINE, 11, kv_type), np.arange(11, dtype=np.int32)
    rotated = cache.store(q, k, v, positions, ROPES, number, level=level, threads=2)
    expected = q, k
    if number is not None:
        rope = ROPES[number]
        expected_q, expected_k = (rope_reference(x, rope.rotations(positions), rope.pairing) for x in (q, k))
        expected = expected_q, expected_k
        np.testing.assert_array_equal(cache.rotate(q, positions, ROPES, number, level=level), rotated)
    for actual, wanted in zip((rotated, *cache.read(11)), entered_reference(*expected, v, kv_type), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_queries_may_have_a_rope_of_their_own(level: str, kv_type: str) -> None:
    """The queries' rope grows with the position and has the same pairing as the keys' rope."""
    q = np.random.default_rng(8).standard_normal((11, 9, 64)).astype(np.float32)
    k, v = random_keys_and_values(NINE, 11, 2)
    cache, positions = Cache(NINE, 11, kv_type), np.arange(11, dtype=np.int32)
    rotated = cache.store(q, k, v, positions, ROPES, 1, 3, level=level, threads=2)
    of_queries, of_keys = (
        rope_reference(x, ROPES[number].rotations(positions), Pairing.NEOX) for x, number in ((q, 3), (k, 1))
    )
    assert np.abs(of_queries[9]).sum() > 1.5 * np.abs(q[9]).sum()
    expected = entered_reference(of_queries, of_keys, v, kv_type)
    for actual, wanted in zip((rotated, *cache.read(11)), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_storing_a_row_touches_only_its_own_place(level: str, kv_type: str) -> None:
    cache = filled(SIX, 70, kv_type, level=level)
    before = cache.memory.copy()
    keys_before, values_before = cache.read(70)
    new = np.full((1, 6, 48), 5, np.float32)
    position = np.array([37], np.int32)
    cache.store(np.ones((1, 6, 48), np.float32), new, new, position, level=level)
    keys, values = cache.read(70)
    _, [expected_key], [expected_value] = entered_reference(new, new, new, kv_type)
    np.testing.assert_array_equal(keys[37], expected_key)
    np.testing.assert_array_equal(values[37], expected_value)
    others = np.arange(70) != 37
    np.testing.assert_array_equal(keys[others], keys_before[others])
    np.testing.assert_array_equal(values[others], values_before[others])
    of_a_row = 2 * 6 * _position_bytes(cache.keys, 48)
    assert 0 < (cache.memory != before).sum() <= of_a_row


SPECIAL = [0.0, 1e-9, 1e-7, 7e-6, 1e-5, 1e-3, 1.0, 6e4, 8e6, 9e6, 3e38, np.inf, np.nan]


@pytest.mark.push
@EVERY_LEVEL
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_groups_of_any_size_are_stored_as_the_twin_says(level: str, kv_type: str) -> None:
    """Covers scales that are subnormal or zero in float16, and groups that contain NaN or infinity."""
    random = np.random.default_rng(3)
    x = random.uniform(-1, 1, (len(SPECIAL), 6, 48)).astype(np.float32)
    x[:, :, 7] = 1
    with np.errstate(all="ignore"):
        x[:, :3] *= np.array(SPECIAL, np.float32)[:, None, None]
    x[:, 3:, 40] = np.array(SPECIAL, np.float32)[:, None]  # one special value among normal ones
    cache = Cache(SIX, len(x), kv_type)
    positions = np.arange(len(x), dtype=np.int32)
    cache.store(x, x, -x, positions, level=level)
    keys, values = cache.read(len(x))
    _, expected_keys, expected_values = entered_reference(x, x, -x, kv_type)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(values, expected_values)
    for stored in (keys, values):
        assert np.isnan(stored[-2:, 3:, 32:]).all()
        assert np.isfinite(stored[:, 3:, :32]).all()


def test_8_bit_numbers_are_off_by_at_most_half_a_step() -> None:
    x = np.random.default_rng(1).standard_normal((1000, 80)).astype(np.float32)
    stored = store_reference(x, Q8_0).read()
    for first, last in ((0, 32), (32, 64), (64, 80)):
        largest = np.abs(x[:, first:last]).max(-1, keepdims=True)
        assert (np.abs(stored - x)[:, first:last] <= 0.5005 * largest / 127).all()  # the scale is rounded too


def test_4_bit_numbers_lose_as_little_energy_as_measured() -> None:
    """Normally distributed numbers lose 0.57 % of their energy. Q4_0's rule, the maximum / -8, loses 0.74 %."""
    x = np.random.default_rng(1).standard_normal((10_000, 32)).astype(np.float32)
    assert np.square(store_reference(x, Q4_0).read() - x).mean() < 0.0058
    assert np.square(store_reference(x[:, :16], Q4_0).read() - x[:, :16]).mean() < 0.0052


@pytest.mark.push
@EVERY_SHAPE
def test_attention_is_near_its_twin(level: str, shape: AttentionShape, kv_type: str) -> None:
    """Allow an error of 2e-6 of the largest value (at most 9e-7 was measured), at block boundaries and between them."""
    lengths = np.array([1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 100, 127, 128, 129, 256, 257, 300], np.int32)
    cache = filled(shape, int(lengths.max()), kv_type, level=level)
    q = np.random.default_rng(0).standard_normal((len(lengths), shape.heads, shape.head_size)).astype(
        np.float32
    ) * np.float32(3)
    actual = cache.attend(q, lengths - 1, level=level, threads=4)
    cache.check(actual, q, [slice(0, length) for length in lengths])


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_attention_to_one_position_is_its_value(level: str, kv_type: str) -> None:
    """With values of 8 bits, the weight 1 is rounded for each group of features."""
    cache = filled(SIX, 1, kv_type, level=level)
    q = np.random.default_rng(0).standard_normal((1, 6, 48)).astype(np.float32)
    _, values = cache.read(1)
    unit = np.abs(values).max() / LARGEST_WEIGHT if kv_type == "q8_0" else 0
    actual = cache.attend(q, np.zeros(1, np.int32), level=level)[0]
    np.testing.assert_allclose(actual, values[0], rtol=0, atol=unit)


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_what_lies_behind_a_rows_position_is_not_seen(level: str, kv_type: str) -> None:
    """Positions after the row's own may even hold NaN, left behind by another sequence."""
    cache = filled(NINE, 64, kv_type, level=level)
    q = np.random.default_rng(0).standard_normal((3, 9, 64)).astype(np.float32)
    positions = np.array([0, 19, 40], np.int32)
    clean = cache.attend(q, positions, level=level)
    nan = np.full((23, 3, 64), np.nan, np.float32)
    later = np.arange(41, 64, dtype=np.int32)
    cache.store(np.zeros((23, 9, 64), np.float32), nan, nan, later, level=level)
    keys, values = cache.read(64)
    assert np.isnan(keys[41:]).all()
    assert np.isnan(values[41:]).all()
    np.testing.assert_array_equal(cache.attend(q, positions, level=level), clean)
    # In one tile, the later rows see the NaN and the earlier ones do not.
    q = np.random.default_rng(0).standard_normal((8, 9, 64)).astype(np.float32)
    seen = np.isnan(cache.attend(q, np.arange(37, 45, dtype=np.int32), level=level)).any((1, 2))
    assert seen.tolist() == [False] * 4 + [True] * 4


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("scale", [30.0, 1e4, 7e4])
def test_scores_far_apart_or_infinite_end_in_numbers_or_nan(level: str, kv_type: str, scale: float) -> None:
    """7e4 overflows float16. Nothing may crash, and finite keys and values must give a finite answer."""
    with np.errstate(over="ignore"):
        cache = filled(NINE, 50, kv_type, level=level, scale=scale)
    q = np.full((50, 9, 64), scale, np.float32)
    actual = cache.attend(q, np.arange(50, dtype=np.int32), level=level, threads=2)
    keys, values = cache.read(50)
    finite = np.logical_and.accumulate(np.isfinite(keys).all((1, 2)) & np.isfinite(values).all((1, 2)))
    assert np.isfinite(actual[finite]).all()
    assert finite.any() or (scale, kv_type) == (7e4, "f16")


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_attention_depends_neither_on_the_neighbours_nor_on_the_threads(level: str, kv_type: str) -> None:
    cache = filled(NINE, 130, kv_type, level=level)
    q = np.random.default_rng(0).standard_normal((12, 9, 64)).astype(np.float32)
    positions = np.random.default_rng(1).integers(0, 130, 12).astype(np.int32)
    together = cache.attend(q, positions, level=level, threads=4)
    for row in range(12):
        alone = cache.attend(q[row : row + 1], positions[row : row + 1], level=level, threads=1 + row % 3)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.cover(1)
@pytest.mark.push
@EVERY_SHAPE
def test_a_tile_of_rows_equals_its_rows_one_by_one(level: str, shape: AttentionShape, kv_type: str) -> None:
    """Consecutive rows are computed together, even across a chunk boundary."""
    cache = filled(shape, 300, kv_type, level=level)
    positions = np.concatenate([np.arange(0, 20), np.arange(110, 150), np.arange(240, 261)]).astype(np.int32)
    q = np.random.default_rng(2).standard_normal((len(positions), shape.heads, shape.head_size)).astype(np.float32)
    together = cache.attend(q, positions, level=level, threads=3)
    for row in range(len(positions)):
        alone = cache.attend(q[row : row + 1], positions[row : row + 1], level=level, threads=2)
        np.testing.assert_array_equal(alone[0], together[row])
