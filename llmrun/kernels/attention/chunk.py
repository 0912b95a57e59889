"""Attention of a tile of queries to a chunk of 128 positions: scores, weights, and the weighted sum of the values.

A row attends to the positions from the start of its window to its own position. The rows of a tile are consecutive, so
most positions of a chunk are visible to all of them. The few positions at both ends are visible only to some rows,
because later rows have later windows. These positions are added row by row. Positions that are not visible to a row are
skipped instead of multiplied by 0, because 0 times NaN is NaN. Blocks that are not visible to any row of the tile are
never read, and neither are their entries in the block table.
"""

from __future__ import annotations

from typing import Any

from numba import types

from llmrun.kernels.attention.tiles import load_elements, load_half, scores, weighted_values
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.compiler import inline_function
from llmrun.layouts import records
from llmrun.layouts.attention import CHUNK, state_floats
from llmrun.layouts.kv_blocks import BLOCK, GROUP, HeadLayout
from llmrun.plan.ops.attention import AttentionWords

WORDS = records.offsets(AttentionWords)

LOWEST = -3.0e38

# Loops over queries and features have a `hidden` bound to keep LLVM from unrolling them. With unrolled loops, the
# kernel was 88 KB and took 4.6 s to compile. Now it is 30 KB and takes 2.8 s. Both run at about the same speed: 256
# rows at position 1,024 of a 1.24B model take 124 to 150 ms now, compared with 132 to 143 ms with unrolled loops.


def chunk_of_tile(level: str, layout: HeadLayout, heads: int, rows: int, *, capped: bool) -> Any:
    """Return a function that computes the states of `heads` x `rows` queries for one chunk.

    The function's `length` is the number of positions up to the first row. `weights`, a float32[2, queries, CHUNK], is
    scratch memory for the weights and for the weights times the scales of the values.
    """
    queries = heads * rows
    head_size, value_size = layout.head_size, layout.value_size
    state_bytes = 4 * state_floats(value_size)
    head_bytes, values_at, scales_at = layout.n_bytes, layout.values, layout.key_scales
    key_row_bytes = layout.element_bytes * BLOCK
    group_size = GROUP if layout.has_scales else head_size
    groups = -(-head_size // group_size)
    scores_zero, scores_step, scores_store = scores(level, layout, heads, rows)
    sum_of_values = _sum_of_values(level, layout, queries)
    add_value = _add_value(level, layout)
    soften = _soften(level, capped=capped)

    @inline_function
    def run(op: Any, query: Any, table: Any, length: Any, chunk: Any, kv_head: Any, weights: Any, states: Any) -> Any:
        start = chunk * CHUNK
        cache = load_i64(op + WORDS.cache) + kv_head * head_bytes
        block_bytes = load_i64(op + WORDS.block_bytes)
        query_stride = load_i64(op + WORDS.q_stride)
        scale = load_f32(op + WORDS.scale)
        table += 4 * (start // BLOCK)
        # The chunk's positions from `first` up to `end` are visible to the first row. For row i, both bounds are i
        # positions later. They are clipped to the chunk below.
        first = length - load_i64(op + WORDS.window) - start
        end = length - start
        for block in range(max(first, 0) // BLOCK, (min(end + rows - 1, CHUNK) + BLOCK - 1) // BLOCK):
            keys = cache + load_i32(table + 4 * block) * block_bytes
            for group in range(groups):
                tile = scores_zero()
                for feature in range(group * group_size, hidden(min((group + 1) * group_size, head_size))):
                    tile = scores_step(tile, keys + key_row_bytes * feature, query + 4 * feature, query_stride)
                scores_store(tile, weights + 4 * BLOCK * block, scale, keys + scales_at + 2 * BLOCK * group, group)
        first_of_all = max(first + rows - 1, 0)
        end_of_all = min(end, CHUNK)
        for index in range(hidden(queries)):
            state = states + index * state_bytes
            row = index // heads
            row_first = max(first + row, 0)
            row_end = min(end + row, CHUNK)
            cap = load_f32(op + WORDS.soft_cap)
            soften(weights + 4 * CHUNK * index, row_first, row_end, cap, state + 4 * value_size)
            for at in range(0, 4 * value_size, 64):
                simd.store_f32x16(state + at, simd.splat(types.float32(0)))
            for position in range(row_first, min(row_end, first_of_all)):
                values = cache + values_at + load_i32(table + 4 * (position // BLOCK)) * block_bytes
                weight = load_f32(weights + 4 * (CHUNK * index + position))
                add_value(values, position % BLOCK, weight, state)
        sum_of_values(cache + values_at, table, block_bytes, first_of_all, end_of_all, weights, states)
        for index in range(heads, hidden(queries)):
            for position in range(max(end_of_all, first_of_all), min(end + index // heads, CHUNK)):
                values = cache + values_at + load_i32(table + 4 * (position // BLOCK)) * block_bytes
                weight = load_f32(weights + 4 * (CHUNK * index + position))
                add_value(values, position % BLOCK, weight, states + index * state_bytes)

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
            score = simd.keep_between(score, first - at, end - at, lowest)
            simd.store_f32x16(scores + 4 * at, score)
            best = simd.maximum(score, best)
        largest = simd.max_lanes(best)
        total = simd.splat(types.float32(0))
        for at in range(begin, end, simd.LANES):
            weight = exp(simd.subtract(simd.load_f32x16(scores + 4 * at), simd.splat(largest)))
            weight = simd.keep_between(weight, first - at, end - at, types.float32(0))
            simd.store_f32x16(scores + 4 * at, weight)
            total = simd.add(total, weight)
        store_f32(largest_and_sum, largest)
        store_f32(largest_and_sum + 4, simd.sum_lanes(total))

    return soften


def _sum_of_values(level: str, layout: HeadLayout, queries: int) -> Any:
    """Return a function that adds the weighted values of positions `first` to `end` to the state of each query.

    It processes two vectors of features at a time, which is the size of a q8_0 group.
    """
    tiles = {vectors: weighted_values(level, layout, queries, vectors) for vectors in (1, 2)}
    load, step, store = tiles[2]
    last_load, last_step, last_store = tiles[1]
    times_scales = _times_scales(level, queries)
    element_bytes, scales_at = layout.element_bytes, layout.value_scales - layout.values
    value_size, has_scales = layout.value_size, layout.has_scales
    pairs = value_size // GROUP
    has_last = value_size % GROUP != 0

    @inline_function
    def sum_of_values(
        values: Any, table: Any, block_bytes: Any, first: Any, end: Any, weights: Any, states: Any
    ) -> Any:
        factors = weights
        for pair in range(pairs):
            if has_scales:
                factors = times_scales(weights, values + scales_at + 2 * BLOCK * pair, table, block_bytes, first, end)
            tile = load(states + 128 * pair)
            for position in range(first, end):
                block = load_i32(table + 4 * (position // BLOCK)) * block_bytes
                value = values + block + element_bytes * (value_size * (position % BLOCK) + GROUP * pair)
                tile = step(tile, value, factors + 4 * position)
            store(tile, states + 128 * pair)
        if has_last:
            if has_scales:
                factors = times_scales(weights, values + scales_at + 2 * BLOCK * pairs, table, block_bytes, first, end)
            last = last_load(states + 128 * pairs)
            for position in range(first, end):
                block = load_i32(table + 4 * (position // BLOCK)) * block_bytes
                value = values + block + element_bytes * (value_size * (position % BLOCK) + GROUP * pairs)
                last = last_step(last, value, factors + 4 * position)
            last_store(last, states + 128 * pairs)

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


def _add_value(level: str, layout: HeadLayout) -> Any:
    """Return a function that adds one weighted value to a state.

    It performs the same operations as `sum_of_values`, for one position and one query.
    """
    fma = simd.Operations(level).fma
    load_value, load_scale = load_elements(level, layout.kv_type), load_half(level)
    element_bytes, scales_at = layout.element_bytes, layout.value_scales - layout.values
    value_size, has_scales = layout.value_size, layout.has_scales

    @inline_function
    def add_value(values: Any, slot: Any, weight: Any, state: Any) -> Any:
        for feature in range(0, value_size, simd.LANES):
            factor = weight
            if has_scales:
                factor = weight * load_scale(values + scales_at + 2 * (BLOCK * (feature // GROUP) + slot))
            value = load_value(values + element_bytes * (value_size * slot + feature))
            at = state + 4 * feature
            simd.store_f32x16(at, fma(simd.splat(factor), value, simd.load_f32x16(at)))

    return add_value
