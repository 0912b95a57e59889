"""Attention's products with keys and values that are multiplied as floats (layouts/kv.py describes the cache).

For several queries, a tile of accumulators holds either the scores of one or two vectors of positions or the weighted
sums of one or two vectors of features. Each kind of tile has three functions: (zero or load, step, store). A key or
value is converted to float32 only once for all queries of a tile. Scales are applied outside the inner loop. The scales
of keys multiply the sums of a group, and the scales of values multiply the weights.

Most positions of a chunk are visible to all rows of a tile. The few positions that are visible only to some rows are
added row by row. Positions that are not visible to a row are skipped instead of multiplied by 0, because 0 times NaN is
NaN.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import BLOCK, CHUNK, GROUP, HeadLayout, KVType, state_floats, tile_vectors
from llmrun.formats.quants.table_quants import IQ4_VALUES as TABLE
from llmrun.kernels.attention.partials import seen_of_chunk
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64
from llmrun.kernels.code.unpack import emit_lookup
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.model.plan.ops.attention import AttentionWords

_WORDS = records.offsets(AttentionWords)


def _zero(level: str, vectors: int) -> Any:
    tile = simd.tile_type(vectors)

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            simd.emit_free_registers(builder, level)
            return ir.Constant(tile.llvm_type, [simd.constant(simd.F32X16, 0.0)] * vectors)

        return tile(), codegen

    return zero


def _emit_elements(builder: Any, level: str, kind: KVType, address: Any) -> Any:
    """Load 16 elements of the cache as floats, without applying their scales.

    The elements are features of one value, or one feature of the keys at 16 positions. Keys in nibbles and elements of
    8 bits are loaded elsewhere.
    """
    if kind.bits == 16:
        return simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, address, simd.F16X16, 2))
    return _emit_entries(builder, level, simd.emit_join(builder, _emit_nibbles(builder, address, simd.LANES // 2)))


def _emit_key_row(builder: Any, level: str, layout: HeadLayout, address: Any, vectors: int) -> list[list[Any]]:
    """Load a row of keys. Returns vectors of positions for each of the row's features."""
    vector_bytes = layout.key_row_bytes * simd.LANES // BLOCK
    starts = [simd.emit_offset(builder, address, vector_bytes * index) for index in range(vectors)]
    if layout.row_features == 1:
        return [[_emit_elements(builder, level, layout.keys, start) for start in starts]]
    pairs = [_emit_nibbles(builder, start, simd.LANES) for start in starts]
    return [[_emit_entries(builder, level, pair[half]) for pair in pairs] for half in range(2)]


def _emit_nibbles(builder: Any, address: Any, n_bytes: int) -> list[Any]:
    """Load bytes and return the vectors of their low and high halves."""
    halves = simd.emit_load(builder, address, ir.VectorType(simd.I8, n_bytes))
    low = builder.and_(halves, simd.constant(halves.type, 15))
    return [low, builder.lshr(halves, simd.constant(halves.type, 4))]


def _emit_entries(builder: Any, level: str, indices: Any) -> Any:
    """Look up entries of the table, and return them as floats."""
    return _emit_floats(builder, emit_lookup(builder, level, ir.Constant(simd.I8X16, TABLE.tolist()), indices))


def _emit_floats(builder: Any, integers: Any) -> Any:
    return builder.sitofp(builder.sext(integers, simd.I32X16), simd.F32X16)


def _load_elements(level: str, kind: KVType) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _emit_elements(builder, level, kind, args[0])

        return simd.f32x16(types.int64), codegen

    return load


def _load_half(level: str) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            halves = simd.emit_splat(builder, simd.emit_load(builder, args[0], simd.F16, 2))
            return builder.extract_element(simd.emit_f16_to_f32(builder, level, halves), simd.I32(0))

        return types.float32(types.int64), codegen

    return load


def _scores(level: str, layout: HeadLayout, heads: int, rows: int, vectors: int) -> tuple[Any, Any, Any]:
    """Return (zero, step, store) for scores over a group of features, with `vectors` vectors of positions per query."""
    tile = simd.tile_type(vectors * heads * rows)
    word = types.int64

    @intrinsic
    def step(typingctx: Any, tile_now: Any, keys: Any, query: Any, query_stride: Any) -> Any:
        """Add the products of a row of keys, which holds one or two features, and the same features of the queries."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, keys, query, query_stride = args
            for feature, of_positions in enumerate(_emit_key_row(builder, level, layout, keys, vectors)):
                for index in range(heads * rows):
                    of_row = builder.add(query, builder.mul(query_stride, simd.I64(index // heads)))
                    of_head = simd.emit_offset(builder, of_row, 4 * (layout.head_size * (index % heads) + feature))
                    value = simd.emit_splat(builder, simd.emit_load(builder, of_head, simd.F32, 4))
                    for vector, key in enumerate(of_positions):
                        total = builder.extract_value(accumulators, vectors * index + vector)
                        total = simd.emit_fma(builder, level, value, key, total)
                        accumulators = builder.insert_value(accumulators, total, vectors * index + vector)
            return accumulators

        return tile(tile, word, word, word), codegen

    @intrinsic
    def store(typingctx: Any, tile_now: Any, scores: Any, scale: Any, key_scales: Any, group: Any) -> Any:
        """Write the scores to `scores`, a float32[queries, CHUNK]. All features form a single group here."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, scores, scale, _, _ = args
            factor = simd.emit_splat(builder, scale)
            for index in range(vectors * heads * rows):
                at = simd.emit_offset(builder, scores, 4 * CHUNK * (index // vectors) + 64 * (index % vectors))
                simd.emit_store(builder, at, builder.fmul(builder.extract_value(accumulators, index), factor), 4)
            simd.emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, types.float32, word, word), codegen

    @intrinsic
    def store_scaled(typingctx: Any, tile_now: Any, scores: Any, scale: Any, key_scales: Any, group: Any) -> Any:
        """Add the contribution of a group to the scores, or overwrite them if the group is the first."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, scores, scale, key_scales, group = args
            of_positions = [
                builder.fmul(simd.emit_f16_to_f32(builder, level, halves), simd.emit_splat(builder, scale))
                for halves in (
                    simd.emit_load(builder, simd.emit_offset(builder, key_scales, shift), simd.F16X16, 2)
                    for shift in range(0, 32 * vectors, 32)
                )
            ]
            is_first = builder.icmp_signed("==", group, simd.I64(0))
            for index in range(vectors * heads * rows):
                at = simd.emit_offset(builder, scores, 4 * CHUNK * (index // vectors) + 64 * (index % vectors))
                before = simd.emit_load(builder, at, simd.F32X16, 4)
                before = builder.select(is_first, simd.constant(simd.F32X16, 0.0), before)
                products = builder.extract_value(accumulators, index)
                total = simd.emit_fma(builder, level, products, of_positions[index % vectors], before)
                simd.emit_store(builder, at, total, 4)
            simd.emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, types.float32, word, word), codegen

    return _zero(level, vectors * heads * rows), step, store_scaled if layout.keys.has_scales else store


def _weighted_values(level: str, layout: HeadLayout, queries: int, vectors: int) -> tuple[Any, Any, Any]:
    """Return (load, step, store) for adding weighted values to the states, with `vectors` vectors per query."""
    tile = simd.tile_type(vectors * queries)
    word = types.int64
    places = [
        4 * state_floats(layout.value_size) * query + 64 * vector
        for query in range(queries)
        for vector in range(vectors)
    ]

    @intrinsic
    def load(typingctx: Any, states: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            simd.emit_free_registers(builder, level)
            accumulators = ir.Constant(tile.llvm_type, ir.Undefined)
            for index, place in enumerate(places):
                sums = simd.emit_load(builder, simd.emit_offset(builder, args[0], place), simd.F32X16, 4)
                accumulators = builder.insert_value(accumulators, sums, index)
            return accumulators

        return tile(word), codegen

    @intrinsic
    def step(typingctx: Any, tile_now: Any, value: Any, weights: Any) -> Any:
        """Add the weighted value of one position."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, value, weights = args
            vector_bytes = layout.values.n_bytes(simd.LANES)
            starts = [simd.emit_offset(builder, value, vector_bytes * index) for index in range(vectors)]
            features = [_emit_elements(builder, level, layout.values, start) for start in starts]
            for query in range(queries):
                at = simd.emit_offset(builder, weights, 4 * CHUNK * query)
                weight = simd.emit_splat(builder, simd.emit_load(builder, at, simd.F32, 4))
                for index, feature in enumerate(features):
                    total = builder.extract_value(accumulators, vectors * query + index)
                    total = simd.emit_fma(builder, level, weight, feature, total)
                    accumulators = builder.insert_value(accumulators, total, vectors * query + index)
            return accumulators

        return tile(tile, word, word), codegen

    @intrinsic
    def store(typingctx: Any, tile_now: Any, states: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, states = args
            for index, place in enumerate(places):
                at = simd.emit_offset(builder, states, place)
                simd.emit_store(builder, at, builder.extract_value(accumulators, index), 4)
            simd.emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word), codegen

    return load, step, store


def block_scores(level: str, layout: HeadLayout, heads: int, rows: int) -> Any:
    """Return a function that computes the scores of a block of positions for the queries of a tile.

    The function takes an op record, and the addresses of a head's part of the block, of the block to prefetch or 0, of
    the first query, and of the block's scores in float32[queries, CHUNK].
    """
    vectors = tile_vectors(level, heads * rows)
    head_size, scales_at, values_at = layout.head_size, layout.key_scales, layout.values_at
    parts = BLOCK // (simd.LANES * vectors)
    row_features, row_bytes = layout.row_features, layout.key_row_bytes
    rows_of_keys, part_bytes = head_size // row_features, row_bytes // parts
    group_rows = GROUP // row_features if layout.keys.has_scales else rows_of_keys
    groups = -(-rows_of_keys // group_rows)
    # While a row of keys is multiplied, as many bytes of values and of the next keys are prefetched.
    value_row_bytes = -(-layout.values.n_bytes(layout.value_size * BLOCK) // rows_of_keys)
    zero, step, store = _scores(level, layout, heads, rows, vectors)

    @inline_function
    def scores(op: Any, keys: Any, following: Any, query: Any, out: Any) -> Any:
        fetches = 1 if following != 0 else 0
        scale, query_stride = load_f32(op + _WORDS.scale), load_i64(op + _WORDS.q_stride)
        for group in range(groups):
            for part in range(hidden(parts)):
                of_part = keys + part_bytes * part
                fetched, fetched_bytes = keys + values_at, value_row_bytes
                if part == 0:
                    fetched, fetched_bytes = following, row_bytes
                tile = zero()
                for row in range(group * group_rows, hidden(min((group + 1) * group_rows, rows_of_keys))):
                    for line in range(0, fetches * max(row_bytes, value_row_bytes), records.CACHE_LINE):
                        simd.prefetch_line(fetched + fetched_bytes * row + line)
                        if parts == 1:
                            simd.prefetch_line(keys + values_at + value_row_bytes * row + line)
                    of_row = query + 4 * row_features * row
                    tile = step(tile, of_part + row_bytes * row, of_row, query_stride)
                at = simd.LANES * vectors * part
                store(tile, out + 4 * at, scale, keys + scales_at + 2 * (BLOCK * group + at), group)

    return scores


def weighted_sums(level: str, layout: HeadLayout, heads: int, rows: int) -> Any:
    """Return a function that writes the weighted sums of a chunk's values to the state of each query.

    The function takes the address of a head's values in block 0, the chunk's part of a block table, the size of a
    block, the ranges of the tile's rows, the chunk, the chunk's range of blocks, the prepared scales, the address of
    float32[2, queries, CHUNK], whose first half holds the weights, and the address of the states. This version does not
    need the range of blocks or the scales.
    """
    queries, value_size = heads * rows, layout.value_size
    state_bytes = 4 * state_floats(value_size)
    add_shared = _sum_of_values(level, layout, queries, tile_vectors(level, queries))
    add_own = _add_values(level, layout)

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
        # The positions that all rows of the tile attend to
        first_of_all, end_of_all = seen_of_chunk(ranges, 0, chunk)
        for row in range(1, rows):
            row_first, row_end = seen_of_chunk(ranges, row, chunk)
            first_of_all, end_of_all = max(first_of_all, row_first), min(end_of_all, row_end)
        for index in range(hidden(queries)):
            state = states + index * state_bytes
            for at in range(0, 4 * value_size, 64):
                simd.store_f32x16(state + at, simd.splat(types.float32(0)))
            if rows > 1:
                row_first, row_end = seen_of_chunk(ranges, index // heads, chunk)
                end = min(row_end, first_of_all)
                add_own(values, table, block_bytes, row_first, end, weights + 4 * CHUNK * index, state)
        add_shared(values, table, block_bytes, first_of_all, end_of_all, weights, states)
        if rows > 1:
            for index in range(hidden(queries)):
                _, row_end = seen_of_chunk(ranges, index // heads, chunk)
                first, state = max(end_of_all, first_of_all), states + index * state_bytes
                add_own(values, table, block_bytes, first, row_end, weights + 4 * CHUNK * index, state)

    return sums


def _sum_of_values(level: str, layout: HeadLayout, queries: int, vectors: int) -> Any:
    """Return a function that adds the weighted values of positions `first` to `end` to the state of each query.

    It processes one or two vectors of features at a time. Two vectors are a group.
    """
    load, step, store = _weighted_values(level, layout, queries, vectors)
    last_load, last_step, last_store = _weighted_values(level, layout, queries, 1)
    times_scales = _times_scales(level, queries)
    scales_at = layout.value_scales - layout.values_at
    value_size, has_scales = layout.value_size, layout.values.has_scales
    features = simd.LANES * vectors
    row_bytes, part_bytes = layout.values.n_bytes(value_size), layout.values.n_bytes(features)
    parts = value_size // features
    has_last = value_size % features != 0

    @inline_function
    def sum_of_values(
        values: Any, table: Any, block_bytes: Any, first: Any, end: Any, weights: Any, states: Any
    ) -> Any:
        factors = weights
        for part in range(parts):
            if has_scales and features * part % GROUP == 0:
                scales = values + scales_at + 2 * BLOCK * (features * part // GROUP)
                factors = times_scales(weights, scales, table, block_bytes, first, end)
            tile = load(states + 4 * features * part)
            for block in range(first // BLOCK, (end + BLOCK - 1) // BLOCK):
                start = BLOCK * block
                of_block = values + load_i32(table + 4 * block) * block_bytes + part_bytes * part
                for slot in range(max(first - start, 0), hidden(min(end - start, BLOCK))):
                    tile = step(tile, of_block + row_bytes * slot, factors + 4 * (start + slot))
            store(tile, states + 4 * features * part)
        if has_last:
            if has_scales:
                scales = values + scales_at + 2 * BLOCK * (features * parts // GROUP)
                factors = times_scales(weights, scales, table, block_bytes, first, end)
            last = last_load(states + 4 * features * parts)
            for block in range(first // BLOCK, (end + BLOCK - 1) // BLOCK):
                start = BLOCK * block
                of_block = values + load_i32(table + 4 * block) * block_bytes + part_bytes * parts
                for slot in range(max(first - start, 0), hidden(min(end - start, BLOCK))):
                    last = last_step(last, of_block + row_bytes * slot, factors + 4 * (start + slot))
            last_store(last, states + 4 * features * parts)

    return sum_of_values


def _times_scales(level: str, queries: int) -> Any:
    load_f16x16 = simd.Operations(level).load_f16x16

    @inline_function
    def times_scales(weights: Any, scales: Any, table: Any, block_bytes: Any, first: Any, end: Any) -> Any:
        """Multiply weights of positions `first` to `end` by the scales of a group. Return the products' address."""
        products = weights + 4 * queries * CHUNK
        for at in range(first // simd.LANES * simd.LANES, end, simd.LANES):
            block = load_i32(table + 4 * (at // BLOCK)) * block_bytes
            scale = load_f16x16(scales + block + 2 * (at % BLOCK))
            for index in range(0, 4 * queries * CHUNK, 4 * CHUNK):
                weight = simd.load_f32x16(weights + index + 4 * at)
                simd.store_f32x16(products + index + 4 * at, simd.multiply(weight, scale))
        return products

    return times_scales


def _add_values(level: str, layout: HeadLayout) -> Any:
    """Return a function that adds the weighted values of positions `first` to `end` to the state of a single query.

    It performs the same operations as `sum_of_values`, one position at a time.
    """
    fma = simd.Operations(level).fma
    load_value, load_scale = _load_elements(level, layout.values), _load_half(level)
    scales_at = layout.value_scales - layout.values_at
    value_size, has_scales = layout.value_size, layout.values.has_scales
    row_bytes, vector_bytes = layout.values.n_bytes(value_size), layout.values.n_bytes(simd.LANES)

    @called_function
    def add_values(values: Any, table: Any, block_bytes: Any, first: Any, end: Any, weights: Any, state: Any) -> Any:
        for position in range(first, end):
            of_block, slot = values + load_i32(table + 4 * (position // BLOCK)) * block_bytes, position % BLOCK
            for feature in range(0, value_size, simd.LANES):
                factor = load_f32(weights + 4 * position)
                if has_scales:
                    factor *= load_scale(of_block + scales_at + 2 * (BLOCK * (feature // GROUP) + slot))
                value = load_value(of_block + row_bytes * slot + vector_bytes * (feature // simd.LANES))
                at = state + 4 * feature
                simd.store_f32x16(at, fma(simd.splat(factor), value, simd.load_f32x16(at)))

    return add_values
