"""Attention's products with keys and values of 8 bits: exact sums of integers (layouts/kv.py describes the cache).

A query is rounded to int8, with a scale per group of 32 features, so scores are integer dot products. The weights of a
chunk are multiplied by the scales of the values and rounded to integers of 14 bits, one set for each group of features,
so weighted sums are integers, too. All sets of a query and chunk share a unit, so groups with small scales get fewer
bits. Only the scales are applied in float32, in an order that depends on nothing but the row.
model/plan/ops/attention.py has the NumPy twin.

The method follows SageAttention (arXiv:2410.02367, 2411.10958), but with weights of 14 bits, because the divergence of
a model was 12 to 14 % larger with 8 bits. Except on AVX2 (`dots.multiplies_words`), each weight is split into two
halves of 7 bits. The halves are valid as signed and as unsigned bytes, and their products cannot overflow the 16-bit
sums of any instruction. The products with the high halves are added first. Then the sums are shifted by 7 bits, and the
products with the low halves are added.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import (
    BLOCK,
    CHUNK,
    GROUP,
    QUAD,
    HeadLayout,
    Scratch,
    n_groups,
    state_floats,
    step_offset,
    tile_vectors,
)
from llmrun.kernels.attention.kv_store import nan_unless_finite, write_bytes
from llmrun.kernels.code import dots, simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, store_f32, store_i32
from llmrun.kernels.compiler import inline_function
from llmrun.model.plan.ops.attention import LARGEST_WEIGHT, LEAST_BOUND

_HALF_BITS = LARGEST_WEIGHT.bit_length() // 2
_HALF = (1 << _HALF_BITS) - 1
_WEIGHT_BYTES = 4 * CHUNK  # room for the integers of one query's weights
_LOW_AT = CHUNK  # the low halves of the weights follow the high halves
_STEP_QUADS = 4  # quads of features or positions that are multiplied at a time


# --- scores -----------------------------------------------------------------------------------------------------------


def prepare_query(level: str, head_size: int) -> Any:
    """Return a function that rounds a query float32[head size], which is already rotated.

    It takes the address of the query, the address of the result (`Scratch` describes it) and the scale of the scores.
    """
    groups, bias = n_groups(head_size), -dots.bias_of(level, dots.SIGNED_BYTES)
    write = write_bytes(1)

    @inline_function
    def prepare(query: Any, out: Any, scale: Any) -> Any:
        for group in range(hidden(groups)):
            first = GROUP * group
            n_vectors = min(GROUP, head_size - first) // simd.LANES
            largest = simd.splat(types.float32(0))
            for vector in range(n_vectors):
                largest = simd.maximum(simd.absolute(simd.load_f32x16(query + 4 * first + 64 * vector)), largest)
            step = simd.max_lanes(largest) / types.float32(127) + nan_unless_finite(query + 4 * first, n_vectors)
            factor = types.float32(1) / step if step > types.float32(0) else types.float32(0)
            total = 0
            for vector in range(n_vectors):
                at = first + simd.LANES * vector
                write(out + at, simd.multiply(simd.load_f32x16(query + 4 * at), simd.splat(factor)))
                total += _sum_of_bytes(out + at)
            store_i32(out + head_size + 4 * group, bias * total)
            store_f32(out + head_size + 4 * (groups + group), step * scale)

    return prepare


@intrinsic
def _sum_of_bytes(typingctx: Any, address: Any) -> Any:
    """Add up 16 signed bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = builder.sext(simd.emit_load(builder, args[0], simd.I8X16), simd.I32X16)
        return builder.sext(simd.emit_fold(builder, integers, builder.add), simd.I64)

    return types.int64(types.int64), codegen


def block_scores(level: str, layout: HeadLayout, queries: int) -> Any:
    """Return a function that computes the scores of a block of positions for the queries of a tile.

    It takes an op record, which is not needed here, and the addresses of a head's part of the block, of the block to
    prefetch or 0, of the queries from `prepare_query`, and of the block's scores in float32[queries, CHUNK].
    """
    head_size, row_bytes, scales_at, values_at = (
        layout.head_size,
        layout.key_row_bytes,
        layout.key_scales,
        layout.values_at,
    )
    groups, vectors = n_groups(head_size), tile_vectors(level, queries)
    begin, add, store = _scores_tile(level, layout, queries, vectors)
    share = -(-values_at // (groups * records.CACHE_LINE)) * records.CACHE_LINE

    @inline_function
    def scores(op: Any, block: Any, following: Any, query: Any, out: Any) -> Any:
        for group in range(hidden(groups)):
            if following != 0:
                for line in range(share * group, min(share * (group + 1), values_at), records.CACHE_LINE):
                    simd.prefetch_line(following + line)
            bias, of_group = query + head_size + 4 * group, query + GROUP * group
            keys = block + row_bytes * (GROUP // QUAD) * group
            quads = min(GROUP, head_size - GROUP * group) // QUAD
            for at in range(0, BLOCK, simd.LANES * vectors):
                tile = begin(bias)
                for quad in range(0, hidden(quads), _STEP_QUADS):
                    tile = add(tile, keys + QUAD * at + row_bytes * quad, of_group + QUAD * quad)
                scales = block + scales_at + 2 * (BLOCK * group + at)
                store(tile, scales, bias + 4 * groups, out + 4 * at, group)

    return scores


def _scores_tile(level: str, layout: HeadLayout, queries: int, vectors: int) -> tuple[Any, Any, Any]:
    """Return (begin, add, store) for the dot products of a group of features."""
    query_bytes, n_sums = Scratch(layout.head_size, layout.value_size).query_bytes, queries * vectors
    row_bytes = layout.key_row_bytes
    unsigned = dots.takes_unsigned(level, dots.SIGNED_BYTES)
    tile, word = simd.integer_tile_type(n_sums), types.int64

    @intrinsic
    def begin(typingctx: Any, bias: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            simd.emit_free_registers(builder, level)
            starts = [_emit_word(builder, args[0], query_bytes * index) for index in range(queries)]
            return _emit_tile(
                builder, tile, [simd.emit_splat(builder, start) for start in starts for _ in range(vectors)]
            )

        return tile(word), codegen

    @intrinsic
    def add(typingctx: Any, sums: Any, keys: Any, query: Any) -> Any:
        """Add the products of _STEP_QUADS x 4 features."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, keys, query = args
            chains = [dots.new_sum(builder, level, builder.extract_value(sums, index)) for index in range(n_sums)]
            for quad in range(_STEP_QUADS):
                of_vectors = _emit_vectors(builder, simd.emit_offset(builder, keys, row_bytes * quad), vectors)
                if unsigned:
                    of_vectors = [builder.xor(of_vector, simd.constant(simd.I8X64, -128)) for of_vector in of_vectors]
                for index in range(queries):
                    four = _emit_word(builder, query, query_bytes * index + QUAD * quad)
                    for vector, of_vector in enumerate(of_vectors):
                        chains[vectors * index + vector].add(of_vector, dots.broadcast(builder, level, four))
                dots.emit_in_order(builder, level, chains)
            return _emit_tile(builder, tile, [chain.total() for chain in chains])

        return tile(tile, word, word), codegen

    @intrinsic
    def store(typingctx: Any, sums: Any, key_scales: Any, query_scale: Any, scores: Any, group: Any) -> Any:
        """Add the contribution of a group to the scores, or overwrite them if the group is the first."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, key_scales, query_scale, scores, group = args
            of_keys = [
                simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, at, simd.F16X16, 2))
                for at in (simd.emit_offset(builder, key_scales, 32 * vector) for vector in range(vectors))
            ]
            is_first = builder.icmp_signed("==", group, simd.I64(0))
            for number in range(n_sums):
                index, vector = divmod(number, vectors)
                of_query = simd.emit_offset(builder, query_scale, query_bytes * index)
                of_query = simd.emit_splat(builder, simd.emit_load(builder, of_query, simd.F32, 4))
                at = simd.emit_offset(builder, scores, 4 * CHUNK * index + 64 * vector)
                before = simd.emit_load(builder, at, simd.F32X16, 4)
                before = builder.select(is_first, simd.constant(simd.F32X16, 0.0), before)
                factor = builder.fmul(of_keys[vector], of_query)
                product = builder.sitofp(builder.extract_value(sums, number), simd.F32X16)
                simd.emit_store(builder, at, simd.emit_fma(builder, level, product, factor, before), 4)
            simd.emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, word, word, word), codegen

    return begin, add, store


def _emit_tile(builder: Any, tile: simd.VectorType, vectors: list[Any]) -> Any:
    value = ir.Constant(tile.llvm_type, ir.Undefined)
    for index, vector in enumerate(vectors):
        value = builder.insert_value(value, vector, index)
    return value


def _emit_vectors(builder: Any, address: Any, count: int) -> list[Any]:
    """Load vectors of 16 x 4 signed bytes."""
    starts = [simd.emit_offset(builder, address, 64 * index) for index in range(count)]
    return [simd.emit_load(builder, start, simd.I8X64) for start in starts]


def _emit_word(builder: Any, address: Any, offset: int) -> Any:
    return simd.emit_load(builder, simd.emit_offset(builder, address, offset), simd.I32, 4)


# --- weighted sums ----------------------------------------------------------------------------------------------------


def prepare_values(level: str, layout: HeadLayout) -> Any:
    """Return a function that prepares the scales of a chunk's values for `weighted_sums` (`Scratch` describes them).

    The function takes the address of a head's values in block 0, the chunk's part of a block table, the size of a
    block, the range of blocks to read, and the address of the result.
    """
    groups, scales_at = n_groups(layout.value_size), layout.value_scales - layout.values_at
    load_f16x16 = simd.Operations(level).load_f16x16
    row = 4 * CHUNK

    @inline_function
    def prepare(values: Any, table: Any, block_bytes: Any, first_block: Any, end_block: Any, out: Any) -> Any:
        zeros = simd.splat(types.float32(0))
        damage = zeros
        for block in range(hidden(CHUNK // BLOCK)):
            for at in range(4 * BLOCK * block, 4 * BLOCK * (block + 1), 64):
                largest, unusable = zeros, zeros
                for group in range(hidden(groups)):
                    scale = zeros
                    if first_block <= block < end_block:
                        of_block = values + load_i32(table + 4 * block) * block_bytes + scales_at
                        scale = load_f16x16(of_block + 2 * BLOCK * group + (at // 2) % (2 * BLOCK))
                    unusable = simd.add(simd.multiply(scale, zeros), unusable)
                    scale = _if_finite(scale)
                    largest = simd.maximum(scale, largest)
                    simd.store_f32x16(out + row * group + at, scale)
                simd.store_f32x16(out + row * groups + at, largest)
                simd.store_f32x16(out + row * (groups + 1) + at, unusable)
                damage = simd.add(damage, unusable)
        simd.store_f32x16(out + row * (groups + 2), simd.splat(simd.sum_lanes(damage)))

    return prepare


@intrinsic
def _if_finite(typingctx: Any, scales: Any) -> Any:
    """Return scales, with 0 in place of NaN and infinity."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        absolute = simd.emit_absolute(builder, args[0])
        is_finite = builder.fcmp_ordered("<", absolute, simd.constant(simd.F32X16, float("inf")))
        return builder.select(is_finite, args[0], simd.constant(simd.F32X16, 0.0))

    return simd.f32x16(simd.f32x16), codegen


def weighted_sums(level: str, layout: HeadLayout, queries: int) -> Any:
    """Return a function that writes the weighted sums of a chunk's values to the state of each query.

    The function takes the same arguments as the one from `floats.weighted_sums`. The weights must be 0 for all
    positions that a query does not attend to, and `prepare_values` must have prepared the scales. This version does not
    need the ranges of the tile's rows.
    """
    value_size, vectors = layout.value_size, tile_vectors(level, queries)
    groups = n_groups(value_size)
    state_bytes = Scratch(layout.head_size, value_size).state_bytes
    row, integers_at, step_at = 4 * CHUNK, 4 * queries * CHUNK, step_offset(value_size)
    value_bytes = layout.n_bytes - layout.values_at  # of one block
    share = -(-value_bytes // (groups * records.CACHE_LINE)) * records.CACHE_LINE
    quantize = _quantize_weights(level)
    sums_of_features = _sums_of_features(level, queries, vectors, value_size)
    narrow = value_size % GROUP != 0 and vectors > 1
    sums_of_last = _sums_of_features(level, queries, 1, value_size) if narrow else sums_of_features

    @inline_function
    def sums(
        values: Any,
        table: Any,
        block_bytes: Any,
        ranges: Any,
        chunk: Any,
        first_block: Any,
        end_block: Any,
        scales: Any,
        weights: Any,
        states: Any,
        ahead: Any,
        ahead_values: Any,
    ) -> Any:
        is_damaged = load_f32(scales + row * (groups + 2)) != types.float32(0)
        for index in range(hidden(queries)):
            step = _largest_product(weights + row * index, scales + row * groups) / types.float32(LARGEST_WEIGHT)
            if is_damaged:
                step += _damage(weights + row * index, scales + row * (groups + 1))
            store_f32(states + state_bytes * index + step_at, step)
        integers = weights + integers_at
        for group in range(hidden(groups)):
            if ahead != 0:
                for block in range(CHUNK // BLOCK):
                    following = ahead_values + load_i32(ahead + 4 * block) * block_bytes
                    for line in range(share * group, min(share * (group + 1), value_bytes), records.CACHE_LINE):
                        simd.prefetch_line(following + line)
            for index in range(hidden(queries)):
                factor = types.float32(1) / load_f32(states + state_bytes * index + step_at)
                quantize(weights + row * index, scales + row * group, factor, integers + _WEIGHT_BYTES * index)
            features = min(GROUP, value_size - GROUP * group)
            of_group = values + GROUP * BLOCK * group
            if narrow and group == groups - 1:
                sums_of_last(
                    of_group, table, block_bytes, first_block, end_block, integers, states, GROUP * group, features
                )
            else:
                sums_of_features(
                    of_group, table, block_bytes, first_block, end_block, integers, states, GROUP * group, features
                )

    return sums


@intrinsic
def _largest_product(typingctx: Any, weights: Any, scales: Any) -> Any:
    """Return the largest product of a weight and a scale of CHUNK positions, or LEAST_BOUND if that is larger."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        products = [builder.fmul(*pair) for pair in zip(*(_emit_chunk(builder, at) for at in args), strict=True)]
        largest = products[0]
        for product in products[1:]:
            largest = simd.emit_larger(builder, product, largest)
        largest = simd.emit_fold(builder, largest, lambda low, high: simd.emit_larger(builder, low, high))
        return simd.emit_larger(builder, largest, simd.F32(LEAST_BOUND))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _damage(typingctx: Any, weights: Any, unusable: Any) -> Any:
    """Return NaN if a position with a nonzero weight has a scale that is not finite, and otherwise 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = simd.constant(simd.F32X16, 0.0)
        total = zeros
        for weight, flag in zip(*(_emit_chunk(builder, at) for at in args), strict=True):
            counts = builder.fcmp_unordered("!=", weight, zeros)
            total = builder.fadd(total, builder.select(counts, flag, zeros))
        return simd.emit_fold(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64), codegen


def _emit_chunk(builder: Any, address: Any) -> list[Any]:
    """Load the floats of all positions of a chunk."""
    starts = [simd.emit_offset(builder, address, at) for at in range(0, 4 * CHUNK, 64)]
    return [simd.emit_load(builder, start, simd.F32X16, 4) for start in starts]


def _quantize_weights(level: str) -> Any:
    """Return a function that multiplies the weights of a chunk by scales and a factor, and rounds them to integers.

    The function takes the addresses of the weights and of the scales, the factor, and the address of the integers.
    `_step_place` describes the order of the integers. NaN becomes an arbitrary integer.
    """
    store = _emit_store_words if dots.multiplies_words(level) else _emit_store_halves
    if level == "avx512vnni":
        store = _emit_store_packed

    @intrinsic
    def quantize(typingctx: Any, weights: Any, scales: Any, factor: Any, integers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, scales, factor, integers = args
            factor, rounding = simd.emit_splat(builder, factor), simd.constant(simd.F32X16, simd.ROUNDING)
            vectors = []
            for weight, scale in zip(_emit_chunk(builder, weights), _emit_chunk(builder, scales), strict=True):
                rounded = simd.emit_fma(builder, level, builder.fmul(weight, factor), scale, rounding)
                bits = builder.bitcast(rounded, simd.I32X16)
                vectors.append(builder.and_(bits, simd.constant(simd.I32X16, LARGEST_WEIGHT)))
            store(builder, integers, vectors)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.int64), codegen

    return quantize


def _emit_store_halves(builder: Any, integers: Any, vectors: list[Any]) -> None:
    """Store the high halves as int8[CHUNK], then the low halves."""
    for index, vector in enumerate(vectors):
        halves = builder.lshr(vector, simd.constant(simd.I32X16, _HALF_BITS)), builder.and_(vector, _constant(_HALF))
        for at, half in zip((0, _LOW_AT), halves, strict=True):
            at = simd.emit_offset(builder, integers, at + simd.LANES * index)
            simd.emit_store(builder, at, builder.trunc(half, simd.I8X16))


def _emit_store_packed(builder: Any, integers: Any, vectors: list[Any]) -> None:
    """Store halves as `_emit_store_halves` does, but leave them in the order of AVX-512's packing instructions."""
    i16x32 = ir.VectorType(simd.I16, 32)
    for at in range(0, len(vectors), 4):
        words = [
            simd.call(builder, "llvm.x86.avx512.packusdw.512", i16x32, vectors[pair : pair + 2])
            for pair in (at, at + 2)
        ]
        high = [builder.lshr(pair, simd.constant(i16x32, _HALF_BITS)) for pair in words]
        low = [builder.and_(pair, simd.constant(i16x32, _HALF)) for pair in words]
        for start, halves in ((0, high), (_LOW_AT, low)):
            packed = simd.call(builder, "llvm.x86.avx512.packuswb.512", simd.I8X64, halves)
            simd.emit_store(builder, simd.emit_offset(builder, integers, start + simd.LANES * at), packed)


def _emit_store_words(builder: Any, integers: Any, vectors: list[Any]) -> None:
    """Store four int32 for every 4 positions: weights 0 and 2 as int16, weights 1 and 3 as int16, and two unused."""
    second = ir.Constant(simd.I32X16, [lane | 2 for lane in range(simd.LANES)])
    for index, vector in enumerate(vectors):
        partners = builder.shuffle_vector(vector, vector, second)
        words = builder.or_(vector, builder.shl(partners, _constant(16)))
        simd.emit_store(builder, simd.emit_offset(builder, integers, 4 * simd.LANES * index), words)


def _constant(value: int) -> Any:
    return simd.constant(simd.I32X16, value)


def _step_place(level: str) -> Any:
    """Return a function of (block, quad): the offset of the weights of a step in the integers of a query."""
    quad_bytes = _quad_bytes(level)
    if level == "avx512vnni":
        # Packing 4 vectors, the weights of 2 blocks, interleaves their 128-bit parts: word 4 * part + vector of 32 bits
        # holds what would be word 4 * vector + part in order.
        return inline_function(lambda block, quad: block // 2 * 64 + block % 2 * 8 + quad)
    return inline_function(lambda block, quad: (block * (BLOCK // QUAD) + quad) * quad_bytes)


def _quad_bytes(level: str) -> int:
    """Return the distance in bytes between the weights of consecutive quads of a step."""
    return 16 if level == "avx512vnni" or dots.multiplies_words(level) else 4


def _sums_of_features(level: str, queries: int, vectors: int, value_size: int) -> Any:
    """Return a function that writes the weighted sums of a group of features, some vectors of features at a time."""
    zero, add, shift, store = _sums_tile(level, queries, vectors, value_size)
    place = _step_place(level)
    halves = 1 if dots.multiplies_words(level) else 2
    step = simd.LANES * vectors

    @inline_function
    def sums(
        values: Any,
        table: Any,
        block_bytes: Any,
        first_block: Any,
        end_block: Any,
        integers: Any,
        states: Any,
        first: Any,
        features: Any,
    ) -> Any:
        for feature in range(0, hidden(features), step):
            tile = zero()
            for half in range(hidden(halves)):
                tile = shift(tile)
                for block in range(first_block, end_block):
                    of_block = values + QUAD * feature + load_i32(table + 4 * block) * block_bytes
                    for quad in range(0, hidden(BLOCK // QUAD), _STEP_QUADS):
                        # Without `hidden`, LLVM would keep an address per query on the stack, and increment them all.
                        of_weights = hidden(integers + half * _LOW_AT + place(block, quad))
                        tile = add(tile, of_block + QUAD * features * quad, QUAD * features, of_weights)
            store(tile, states, 4 * (first + feature))

    return sums


def _sums_tile(level: str, queries: int, vectors: int, value_size: int) -> tuple[Any, Any, Any, Any]:
    """Return (zero, add, shift, store) for the weighted sums of some vectors of features."""
    n_sums = vectors * queries
    tile, word = simd.integer_tile_type(n_sums), types.int64
    state_bytes, step_at = 4 * state_floats(value_size), step_offset(value_size)
    n_words = 2 if dots.multiplies_words(level) else 1  # words of 32 bits that hold the weights of 4 positions
    quad_bytes = _quad_bytes(level)

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            simd.emit_free_registers(builder, level)
            return ir.Constant(tile.llvm_type, [_constant(0)] * n_sums)

        return tile(), codegen

    @intrinsic
    def add(typingctx: Any, sums: Any, values: Any, stride: Any, integers: Any) -> Any:
        """Add the weighted values of _STEP_QUADS x 4 positions. Quads of values are `stride` bytes apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, values, stride, integers = args
            totals = [builder.extract_value(sums, index) for index in range(n_sums)]
            for quad in range(_STEP_QUADS):
                of_vectors = _emit_vectors(builder, builder.add(values, builder.mul(stride, simd.I64(quad))), vectors)
                for query in range(queries):
                    at = _WEIGHT_BYTES * query + quad_bytes * quad
                    weights = [_emit_word(builder, integers, at + word * 4) for word in range(n_words)]
                    for vector, of_vector in enumerate(of_vectors):
                        index = vectors * query + vector
                        totals[index] = dots.emit_weighted(builder, level, totals[index], of_vector, weights)
            return _emit_tile(builder, tile, totals)

        return tile(tile, word, word, word), codegen

    @intrinsic
    def shift(typingctx: Any, sums: Any) -> Any:
        """Multiply the sums of the high halves by 2**7, before those of the low halves are added."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            totals = [builder.extract_value(args[0], index) for index in range(n_sums)]
            return _emit_tile(builder, tile, [builder.shl(total, _constant(_HALF_BITS)) for total in totals])

        return tile(tile), codegen

    @intrinsic
    def store(typingctx: Any, sums: Any, states: Any, offset: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, states, offset = args
            to = builder.add(states, offset)
            for index in range(n_sums):
                query, vector = divmod(index, vectors)
                step = simd.emit_load(
                    builder, simd.emit_offset(builder, states, state_bytes * query + step_at), simd.F32, 4
                )
                total = builder.sitofp(builder.extract_value(sums, index), simd.F32X16)
                at = simd.emit_offset(builder, to, state_bytes * query + 64 * vector)
                simd.emit_store(builder, at, builder.fmul(total, simd.emit_splat(builder, step)), 4)
            simd.emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, word), codegen

    return zero, add, shift, store
