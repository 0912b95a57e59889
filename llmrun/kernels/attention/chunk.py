"""Attention of a tile of queries to a chunk of 128 positions: scores, weights, and the weighted sum of the values.

A row attends to a range of positions, which usually ends with the row's own position. Blocks that are not visible to
any row of the tile are never read, although one of them may be prefetched. integers.py and floats.py contain the
products with keys and with values, which depend on the type of the cache. Keys and values may have different types.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import BLOCK, CHUNK, Q8_0, HeadLayout, Scratch
from llmrun.kernels.attention import floats, integers
from llmrun.kernels.attention.partials import seen_by_any, seen_of_chunk
from llmrun.kernels.attention.states import LOWEST
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.model.plan.ops.attention import AttentionWords

WORDS = records.offsets(AttentionWords)

# Loops over queries and features have a `hidden` bound to keep LLVM from unrolling them. In an earlier kernel, unrolled
# loops took three times as much code and 1.6 times as long to compile, and ran at about the same speed.


def prepare_chunk(level: str, layout: HeadLayout) -> Any:
    """Return a function that prepares a chunk for all tiles of `rows` rows that have the same block table."""
    values_at, head_bytes = layout.values_at, layout.n_bytes
    scales_at = Scratch(layout.head_size, layout.value_size).scales
    prepare_values = integers.prepare_values(level, layout)

    @called_function
    def prepare(op: Any, table: Any, ranges: Any, rows: Any, chunk: Any, kv_head: Any, scratch: Any) -> Any:
        first, end = seen_by_any(ranges, rows, chunk)
        values = load_i64(op + WORDS.cache) + kv_head * head_bytes + values_at
        block_bytes = load_i64(op + WORDS.block_bytes)
        of_chunk = table + 4 * chunk * (CHUNK // BLOCK)
        first_block, end_block = first // BLOCK, (end + BLOCK - 1) // BLOCK
        prepare_values(values, of_chunk, block_bytes, first_block, end_block, scratch + scales_at)

    @inline_function
    def prepare_nothing(op: Any, table: Any, ranges: Any, rows: Any, chunk: Any, kv_head: Any, scratch: Any) -> Any:
        pass

    return prepare if layout.values is Q8_0 else prepare_nothing


def chunk_of_tile(level: str, layout: HeadLayout, heads: int, rows: int, prepare: Any, *, capped: bool) -> Any:
    """Return a function that computes the states of `heads` x `rows` queries for one chunk.

    The function's `ranges` is the address of the positions that the tile's rows attend to (partials.py). `table` is a
    block table that is valid for all of these rows. `query` is the address of the first query. `ahead` is the address
    of the part of the block table for the chunk to prefetch meanwhile, or 0, and `ahead_head` is the KV head to
    prefetch. If `count` is not 0, the tile is the first of `count` rows, and prepares the chunk for all of them with
    `prepare`, which comes from `prepare_chunk`.
    """
    queries = heads * rows
    at = Scratch(layout.head_size, layout.value_size)
    weights_at, states_at, state_bytes, scales_at = at.weights, at.later, at.state_bytes, at.scales
    value_size, head_bytes, values_at = layout.value_size, layout.n_bytes, layout.values_at
    # Integers are multiplied faster than memory is read, so the whole next chunk is prefetched during a chunk. With
    # floats, prefetching the next block is enough.
    looks_ahead = layout.keys is Q8_0
    if looks_ahead:
        block_scores = integers.block_scores(level, layout, queries)
    else:
        block_scores = floats.block_scores(level, layout, heads, rows)
    if layout.values is Q8_0:
        weighted_sums = integers.weighted_sums(level, layout, queries)
    else:
        weighted_sums = floats.weighted_sums(level, layout, heads, rows)
    soften = _soften(level, capped=capped, fills=layout.values is Q8_0)

    @called_function
    def run(
        op: Any,
        query: Any,
        table: Any,
        ranges: Any,
        chunk: Any,
        kv_head: Any,
        scratch: Any,
        ahead: Any,
        ahead_head: Any,
        count: Any,
    ) -> Any:
        cache = load_i64(op + WORDS.cache) + kv_head * head_bytes
        ahead_cache = load_i64(op + WORDS.cache) + ahead_head * head_bytes
        block_bytes = load_i64(op + WORDS.block_bytes)
        weights, states = scratch + weights_at, scratch + states_at
        of_chunk = table + 4 * chunk * (CHUNK // BLOCK)
        first_of_any, end_of_any = seen_by_any(ranges, rows, chunk)
        first_block, end_block = first_of_any // BLOCK, (end_of_any + BLOCK - 1) // BLOCK
        for block in range(first_block, end_block):
            of_block = cache + load_i32(of_chunk + 4 * block) * block_bytes
            following = 0
            if looks_ahead and ahead != 0:
                following = ahead_cache + load_i32(ahead + 4 * block) * block_bytes
            elif not looks_ahead and count > 0:
                following = cache + load_i32(of_chunk + 4 * min(block + 1, end_block - 1)) * block_bytes
            block_scores(op, of_block, following, query, weights + 4 * BLOCK * block)
        if count > 0:
            prepare(op, table, ranges, count, chunk, kv_head, scratch)
        for index in range(hidden(queries)):
            first, end = seen_of_chunk(ranges, index // heads, chunk)
            cap = load_f32(op + WORDS.soft_cap)
            soften(weights + 4 * CHUNK * index, first, end, cap, states + index * state_bytes + 4 * value_size)
        of_values, ahead_values, scales = cache + values_at, ahead_cache + values_at, scratch + scales_at
        weighted_sums(
            of_values,
            of_chunk,
            block_bytes,
            ranges,
            chunk,
            first_block,
            end_block,
            scales,
            weights,
            states,
            ahead,
            ahead_values,
        )

    return run


def _soften(level: str, *, capped: bool, fills: bool) -> Any:
    """Return a function that converts scores to weights, which are exponentials relative to the maximum score.

    If `fills` is true, the weights of positions outside `first` to `end` become 0.
    """
    exp = simd.Operations(level).exp
    tanh = curves.tanh(level)
    soften_all = _soften_all(level)

    @inline_function
    def soften(scores: Any, first: Any, end: Any, cap: Any, largest_and_sum: Any) -> Any:
        """Convert the scores of positions `first` to `end` of a chunk, in place."""
        if not capped and first <= 0 and end >= CHUNK:
            soften_all(scores, largest_and_sum)
            return
        lowest = types.float32(LOWEST)
        best = simd.splat(lowest)
        begin = min(first // simd.LANES * simd.LANES, CHUNK)
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
        if fills:
            for at in range(0, begin, simd.LANES):
                simd.store_f32x16(scores + 4 * at, simd.splat(types.float32(0)))
            for at in range(max(end + simd.LANES - 1, 0) // simd.LANES * simd.LANES, CHUNK, simd.LANES):
                simd.store_f32x16(scores + 4 * at, simd.splat(types.float32(0)))
        store_f32(largest_and_sum, largest)
        store_f32(largest_and_sum + 4, simd.sum_lanes(total))

    return soften


def _soften_all(level: str) -> Any:
    """Return a faster version of `soften` for chunks in which all positions are visible, with the same results."""

    @intrinsic
    def soften(typingctx: Any, scores: Any, largest_and_sum: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            places = [simd.emit_offset(builder, args[0], at) for at in range(0, 4 * CHUNK, 4 * simd.LANES)]
            scores = [simd.emit_load(builder, place, simd.F32X16, 4) for place in places]
            best = simd.constant(simd.F32X16, LOWEST)
            for score in scores:
                best = simd.emit_larger(builder, score, best)
            largest = simd.emit_fold(builder, best, lambda low, high: simd.emit_larger(builder, low, high))
            repeated, total = simd.emit_splat(builder, largest), simd.constant(simd.F32X16, 0.0)
            for place, score in zip(places, scores, strict=True):
                weight = simd.emit_exp(builder, level, builder.fsub(score, repeated))
                simd.emit_store(builder, place, weight, 4)
                total = builder.fadd(total, weight)
            simd.emit_store(builder, args[1], largest, 4)
            of_all = simd.emit_fold(builder, total, builder.fadd)
            simd.emit_store(builder, simd.emit_offset(builder, args[1], 4), of_all, 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return soften
