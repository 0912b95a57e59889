"""Attention of a tile of queries to a chunk of 128 positions: scores, weights, and the weighted sum of the values.

A row attends to a range of positions, which usually ends with its own. Most positions of a chunk are visible to all
rows of a tile. The few positions that are visible only to some rows are added row by row. Positions that are not
visible to a row are skipped instead of multiplied by 0, because 0 times NaN is NaN. Blocks that are not visible to any
row of the tile are never read, and neither are their entries in the block table.
"""

from __future__ import annotations

from typing import Any

from numba import types

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import BLOCK, CHUNK, GROUP, HeadLayout, state_floats, tile_vectors
from llmrun.kernels.attention.partials import end_seen, first_seen
from llmrun.kernels.attention.tiles import load_elements, load_half, scores, weighted_values
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.model.plan.ops.attention import AttentionWords

WORDS = records.offsets(AttentionWords)

LOWEST = -3.0e38

# Loops over queries and features have a `hidden` bound to keep LLVM from unrolling them. With unrolled loops, the
# kernel was 88 KB and took 4.6 s to compile. Now it is 30 KB and takes 2.8 s. Both run at about the same speed: 256
# rows at position 1,024 of a 1.24B model take 124 to 150 ms now, compared with 132 to 143 ms with unrolled loops.


def chunk_of_tile(level: str, layout: HeadLayout, heads: int, rows: int, *, capped: bool) -> Any:
    """Return a function that computes the states of `heads` x `rows` queries for one chunk.

    The function's `ranges` is the address of the positions that the tile's rows attend to (partials.py). `table` is a
    block table that is right for all of these rows. `weights`, a float32[2, queries, CHUNK], is scratch memory for the
    weights and for the weights times the scales of the values.
    """
    queries = heads * rows
    vectors = tile_vectors(level, queries)
    head_size, value_size = layout.head_size, layout.value_size
    state_bytes = 4 * state_floats(value_size)
    head_bytes, values_at, scales_at = layout.n_bytes, layout.values_at, layout.key_scales
    parts = BLOCK // (simd.LANES * vectors)
    row_features, row_bytes = layout.row_features, layout.key_row_bytes
    rows_of_keys, part_bytes = head_size // row_features, row_bytes // parts
    group_rows = GROUP // row_features if layout.keys.has_scales else rows_of_keys
    groups = -(-rows_of_keys // group_rows)
    # While a row of keys is multiplied, as many bytes of values and of the next keys are prefetched.
    value_row_bytes = -(-layout.values.n_bytes(value_size * BLOCK) // rows_of_keys)
    scores_zero, scores_step, scores_store = scores(level, layout, heads, rows, vectors)
    sum_of_values = _sum_of_values(level, layout, queries, vectors)
    add_values = _add_values(level, layout)
    soften = _soften(level, capped=capped)

    @inline_function
    def seen(ranges: Any, row: Any, start: Any) -> Any:
        """Return the range of a chunk's positions that a row attends to, which may be empty."""
        return max(first_seen(ranges, row) - start, 0), min(end_seen(ranges, row) - start, CHUNK)

    @inline_function
    def run(op: Any, query: Any, table: Any, ranges: Any, chunk: Any, kv_head: Any, weights: Any, states: Any) -> Any:
        start = chunk * CHUNK
        cache = load_i64(op + WORDS.cache) + kv_head * head_bytes
        block_bytes = load_i64(op + WORDS.block_bytes)
        query_stride = load_i64(op + WORDS.q_stride)
        scale = load_f32(op + WORDS.scale)
        table += 4 * (start // BLOCK)
        # The chunk's positions that any row of the tile attends to, and those that all of them attend to.
        first_of_any, end_of_any = seen(ranges, 0, start)
        first_of_all, end_of_all = first_of_any, end_of_any
        for row in range(1, rows):
            row_first, row_end = seen(ranges, row, start)
            first_of_any, end_of_any = min(first_of_any, row_first), max(end_of_any, row_end)
            first_of_all, end_of_all = max(first_of_all, row_first), min(end_of_all, row_end)
        # Blocks lie anywhere in memory, so the processor cannot prefetch across them. With 16 sequences at depth 1,024,
        # these prefetches took the attention of SmolLM2 from 32 to 24 ms, and that of a 1.24B model from 53 to 41 ms.
        first_block, end_block = first_of_any // BLOCK, (end_of_any + BLOCK - 1) // BLOCK
        first_keys = cache + load_i32(table + 4 * first_block) * block_bytes
        for row in range(rows_of_keys):
            simd.prefetch_line(first_keys + row_bytes * row)
        for block in range(first_block, end_block):
            keys = cache + load_i32(table + 4 * block) * block_bytes
            next_keys = cache + load_i32(table + 4 * min(block + 1, end_block - 1)) * block_bytes
            for group in range(groups):
                for part in range(hidden(parts)):
                    of_part = keys + part_bytes * part
                    fetched, fetched_bytes = keys + values_at, value_row_bytes
                    if part == 0:
                        fetched, fetched_bytes = next_keys, row_bytes
                    tile = scores_zero()
                    for row in range(group * group_rows, hidden(min((group + 1) * group_rows, rows_of_keys))):
                        for line in range(0, max(row_bytes, value_row_bytes), records.CACHE_LINE):
                            simd.prefetch_line(fetched + fetched_bytes * row + line)
                            if parts == 1:
                                simd.prefetch_line(keys + values_at + value_row_bytes * row + line)
                        of_row = query + 4 * row_features * row
                        tile = scores_step(tile, of_part + row_bytes * row, of_row, query_stride)
                    at = BLOCK * block + simd.LANES * vectors * part
                    key_scales = keys + scales_at + 2 * BLOCK * group + 2 * simd.LANES * vectors * part
                    scores_store(tile, weights + 4 * at, scale, key_scales, group)
        for index in range(hidden(queries)):
            state = states + index * state_bytes
            row_first, row_end = seen(ranges, index // heads, start)
            cap = load_f32(op + WORDS.soft_cap)
            soften(weights + 4 * CHUNK * index, row_first, row_end, cap, state + 4 * value_size)
            for at in range(0, 4 * value_size, 64):
                simd.store_f32x16(state + at, simd.splat(types.float32(0)))
            if rows > 1:
                end = min(row_end, first_of_all)
                add_values(cache + values_at, table, block_bytes, row_first, end, weights + 4 * CHUNK * index, state)
        sum_of_values(cache + values_at, table, block_bytes, first_of_all, end_of_all, weights, states)
        if rows > 1:
            for index in range(hidden(queries)):
                _, row_end = seen(ranges, index // heads, start)
                first, state = max(end_of_all, first_of_all), states + index * state_bytes
                add_values(cache + values_at, table, block_bytes, first, row_end, weights + 4 * CHUNK * index, state)

    return run


def _soften(level: str, *, capped: bool) -> Any:
    """Return a function that converts scores to weights, which are exponentials relative to the maximum score."""
    exp = simd.Operations(level).exp
    tanh = curves.tanh(level)

    @inline_function
    def soften(scores: Any, first: Any, end: Any, cap: Any, largest_and_sum: Any) -> Any:
        """Convert the scores of positions `first` to `end` of a chunk, in place."""
        lowest = types.float32(LOWEST)
        best = simd.splat(lowest)
        begin = first // simd.LANES * simd.LANES
        for at in range(begin, end, simd.LANES):
            score = simd.load_f32x16(scores + 4 * at)
            if capped:
                score = simd.multiply(tanh(simd.divide(score, simd.splat(cap))), simd.splat(cap))
            if at < first or end < at + simd.LANES:
                score = simd.keep_between(score, first - at, end - at, lowest)
            simd.store_f32x16(scores + 4 * at, score)
            best = simd.maximum(score, best)
        largest = simd.max_lanes(best)
        total = simd.splat(types.float32(0))
        for at in range(begin, end, simd.LANES):
            weight = exp(simd.subtract(simd.load_f32x16(scores + 4 * at), simd.splat(largest)))
            if at < first or end < at + simd.LANES:
                weight = simd.keep_between(weight, first - at, end - at, types.float32(0))
            simd.store_f32x16(scores + 4 * at, weight)
            total = simd.add(total, weight)
        store_f32(largest_and_sum, largest)
        store_f32(largest_and_sum + 4, simd.sum_lanes(total))

    return soften


def _sum_of_values(level: str, layout: HeadLayout, queries: int, vectors: int) -> Any:
    """Return a function that adds the weighted values of positions `first` to `end` to the state of each query.

    It processes one or two vectors of features at a time. Two vectors are a group.
    """
    load, step, store = weighted_values(level, layout, queries, vectors)
    last_load, last_step, last_store = weighted_values(level, layout, queries, 1)
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
    load_value, load_scale = load_elements(level, layout.values), load_half(level)
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
