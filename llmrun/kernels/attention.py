"""Attention over the paged KV cache (kv_layout.py), in chunks of 128 positions.

Within a chunk: all scores, their maximum, the exponentials and their sum, the weighted sum of the values. Chunks are
then merged in order of position (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). In a step of one row
the chunks are shared out among the threads and merged by `merge`; in a step of many rows whoever has a row merges them
himself. Both do the same operations in the same order, so a result depends on nothing but the row's own positions.

Heads that share keys and values (GQA), and rows that follow each other in a sequence, are computed as one tile: a key
is converted to float32 once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba import types

from llmrun.kernels import records, simd
from llmrun.kernels.attention_layout import CHUNK, NARROW_TILE_QUERIES, TILE_QUERIES, state_floats
from llmrun.kernels.attention_tiles import load_elements, load_half, scores, weighted_values
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.curves import soft_cap_reference
from llmrun.kernels.kv_layout import BLOCK, GROUP, Q8_0, HeadLayout
from llmrun.kernels.memory import hidden, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.work import PRIVATE_INPUT, PRIVATE_OUTPUT, claim, n_rows, private_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
A_QUERY, A_QUERY_STRIDE, A_OUT, A_OUT_STRIDE, A_KV, A_BLOCK_BYTES, A_KV_HEADS, A_SCALE = (ARG + 8 * i for i in range(8))
A_SCRATCH, A_SCRATCH_BYTES, A_PARTIALS, A_PARTIAL_STRIDE = (ARG + 8 * i for i in range(8, 12))
M_PARTIALS, M_PARTIAL_STRIDE, M_OUT, M_OUT_STRIDE, M_HEADS, M_SCRATCH, M_SCRATCH_BYTES = (ARG + 8 * i for i in range(7))

_LOWEST = -3.0e38

# Loops over queries and features end at a `hidden` number: unrolled, this kernel was 88 KB and took 4.6 s to compile,
# so it is 30 KB and takes 2.8, and is as fast (1.24B, 256 rows at 1,024: 132 to 143 ms unrolled, 124 to 150 so).


@kernel_family
def attention(level: str, head_size: int, group: int, kv_type: str) -> Callable[..., None]:
    """Causal attention of query heads in groups of `group` to a KV head.

    An item is a tile of heads, with a chunk of the one row or with a few rows.
    """
    heads = _tile_heads(level, group)
    tile_rows = _tile_queries(level) // heads
    row_bytes = 4 * heads * head_size
    state_bytes = 4 * state_floats(head_size)
    one_row = _all_chunks(level, head_size, heads, 1, kv_type)
    many_rows = _all_chunks(level, head_size, heads, tile_rows, kv_type)
    one_chunk = _chunk(level, head_size, heads, 1, kv_type)

    @inline_function
    def follow(step: Any, row: Any) -> Any:
        """Whether the rows of a tile are positions of the same sequence, one after the other."""
        tables = load_i64(step + records.STEP_TABLES)
        positions = load_i64(step + records.STEP_POSITIONS)
        for index in range(row + 1, row + tile_rows):
            if load_i64(tables + 8 * index) != load_i64(tables + 8 * row):
                return False
            if load_i32(positions + 4 * index) != load_i32(positions + 4 * row) + index - row:
                return False
        return True

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        head_tiles = load_i64(op + A_KV_HEADS) * (group // heads)
        query_stride = load_i64(op + A_QUERY_STRIDE)
        out_stride = load_i64(op + A_OUT_STRIDE)
        query0 = load_i64(op + A_QUERY) + private_row(op, step, thread, PRIVATE_INPUT) * query_stride
        scratch = load_i64(op + A_SCRATCH) + thread * load_i64(op + A_SCRATCH_BYTES)
        tables = load_i64(step + records.STEP_TABLES)
        positions = load_i64(step + records.STEP_POSITIONS)
        item = claim(op)
        if rows == 1:
            length = load_i32(positions) + 1
            while item < head_tiles * ((length + CHUNK - 1) // CHUNK):
                tile = item % head_tiles
                chunk = item // head_tiles
                states = load_i64(op + A_PARTIALS) + chunk * load_i64(op + A_PARTIAL_STRIDE)
                states += tile * heads * state_bytes
                kv_head = tile * heads // group
                one_chunk(op, query0 + tile * row_bytes, load_i64(tables), length, chunk, kv_head, scratch, states)
                item = claim(op)
            return
        row_tiles = (rows + tile_rows - 1) // tile_rows
        while item < head_tiles * row_tiles:
            # The last rows first: in a long prompt they have the most to do.
            first = (row_tiles - 1 - item // head_tiles) * tile_rows
            tile = item % head_tiles
            kv_head = tile * heads // group
            query = query0 + first * query_stride + tile * row_bytes
            out = load_i64(op + A_OUT) + first * out_stride + tile * row_bytes
            if first + tile_rows <= rows and follow(step, first):
                length = load_i32(positions + 4 * first) + 1
                many_rows(op, query, out, load_i64(tables + 8 * first), length, kv_head, scratch)
            else:
                for row in range(first, min(first + tile_rows, rows)):
                    table = load_i64(tables + 8 * row)
                    length = load_i32(positions + 4 * row) + 1
                    one_row(op, query, out, table, length, kv_head, scratch)
                    query += query_stride
                    out += out_stride
            item = claim(op)

    return run


@kernel_family
def merge(level: str, head_size: int) -> Callable[..., None]:
    """After a step of one row: the chunks of every head, in order. Every thread does it for itself."""
    clear, add, finish = _states(level, head_size)
    state_bytes = 4 * state_floats(head_size)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        if n_rows(op, step) == 1:
            scratch = load_i64(op + M_SCRATCH) + thread * load_i64(op + M_SCRATCH_BYTES)
            out = load_i64(op + M_OUT) + private_row(op, step, thread, PRIVATE_OUTPUT) * load_i64(op + M_OUT_STRIDE)
            length = load_i32(load_i64(step + records.STEP_POSITIONS)) + 1
            for head in range(load_i64(op + M_HEADS)):
                state = load_i64(op + M_PARTIALS) + head * state_bytes
                clear(scratch)
                for _ in range((length + CHUNK - 1) // CHUNK):
                    add(scratch, state)
                    state += load_i64(op + M_PARTIAL_STRIDE)
                finish(scratch, out + 4 * head * head_size)

    return run


def _tile_queries(level: str) -> int:
    return TILE_QUERIES.get(level, NARROW_TILE_QUERIES)


def _tile_heads(level: str, group: int) -> int:
    """How many of a KV head's query heads are computed together."""
    return max(n for n in range(1, _tile_queries(level) + 1) if group % n == 0)


def _states(level: str, head_size: int) -> tuple[Any, Any, Any]:
    """(clear, add, finish): what is known of a query: weighted values [head size], largest score, sum of weights."""
    operations = simd.Operations(level)
    fma, exp = operations.fma, operations.exp
    largest_at, sum_at = 4 * head_size, 4 * head_size + 4

    @inline_function
    def clear(state: Any) -> Any:
        for at in range(0, 4 * head_size, 64):
            simd.store_f32x16(state + at, simd.splat(types.float32(0)))
        store_f32(state + largest_at, types.float32(_LOWEST))
        store_f32(state + sum_at, types.float32(0))

    @inline_function
    def add(state: Any, later: Any) -> Any:
        """Onto what is known from earlier positions."""
        largest = max(load_f32(state + largest_at), load_f32(later + largest_at))
        faded = exp(simd.splat(load_f32(state + largest_at) - largest))
        weight = exp(simd.splat(load_f32(later + largest_at) - largest))
        for at in range(0, 4 * head_size, 64):
            before = simd.multiply(simd.load_f32x16(state + at), faded)
            simd.store_f32x16(state + at, fma(simd.load_f32x16(later + at), weight, before))
        total = load_f32(state + sum_at) * simd.first_lane(faded)
        store_f32(state + sum_at, total + load_f32(later + sum_at) * simd.first_lane(weight))
        store_f32(state + largest_at, largest)

    @inline_function
    def finish(state: Any, out: Any) -> Any:
        inverse = simd.splat(types.float32(1) / load_f32(state + sum_at))
        for at in range(0, 4 * head_size, 64):
            simd.store_f32x16(out + at, simd.multiply(simd.load_f32x16(state + at), inverse))

    return clear, add, finish


def _all_chunks(level: str, head_size: int, heads: int, rows: int, kv_type: str) -> Any:
    """Attention of `heads` x `rows` queries; `length` is that of the first row, the others are one longer each."""
    chunk_of_tile = _chunk(level, head_size, heads, rows, kv_type)
    clear, add, finish = _states(level, head_size)
    queries = heads * rows
    state_bytes = 4 * state_floats(head_size)

    @inline_function
    def all_chunks(op: Any, query: Any, out: Any, table: Any, length: Any, kv_head: Any, scratch: Any) -> Any:
        later = scratch + 2 * 4 * queries * CHUNK
        states = later + queries * state_bytes
        for index in range(hidden(queries)):
            clear(states + index * state_bytes)
        for chunk in range((length + rows - 1 + CHUNK - 1) // CHUNK):
            chunk_of_tile(op, query, table, length, chunk, kv_head, scratch, later)
            for index in range(hidden(queries)):
                if chunk * CHUNK < length + index // heads:
                    add(states + index * state_bytes, later + index * state_bytes)
        for index in range(hidden(queries)):
            to = out + index // heads * load_i64(op + A_OUT_STRIDE) + index % heads * 4 * head_size
            finish(states + index * state_bytes, to)

    return all_chunks


def _chunk(level: str, head_size: int, heads: int, rows: int, kv_type: str) -> Any:
    """One chunk of positions for `heads` x `rows` queries: their states, and in `weights` float32[2, queries, CHUNK]:
    the weights, and those times the scales of values."""
    queries = heads * rows
    state_bytes = 4 * state_floats(head_size)
    layout = HeadLayout.of(kv_type, head_size)
    head_bytes, values_at, scales_at = layout.n_bytes, layout.values, layout.key_scales
    key_row_bytes = layout.element_bytes * BLOCK
    group_size = GROUP if kv_type == Q8_0 else head_size
    groups = -(-head_size // group_size)
    scores_zero, scores_step, scores_store = scores(level, head_size, heads, rows, kv_type)
    sum_of_values = _sum_of_values(level, head_size, queries, kv_type)
    add_value = _add_value(level, head_size, kv_type)
    soften = _soften(level)

    @inline_function
    def chunk_of_tile(
        op: Any, query: Any, table: Any, length: Any, chunk: Any, kv_head: Any, weights: Any, states: Any
    ) -> Any:
        start = chunk * CHUNK
        cache = load_i64(op + A_KV) + kv_head * head_bytes
        block_bytes = load_i64(op + A_BLOCK_BYTES)
        query_stride = load_i64(op + A_QUERY_STRIDE)
        scale = load_f32(op + A_SCALE)
        table += 4 * (start // BLOCK)
        seen_by_last = min(CHUNK, length + rows - 1 - start)
        for block in range((seen_by_last + BLOCK - 1) // BLOCK):
            keys = cache + load_i32(table + 4 * block) * block_bytes
            for group in range(groups):
                tile = scores_zero()
                for feature in range(group * group_size, hidden(min((group + 1) * group_size, head_size))):
                    tile = scores_step(tile, keys + key_row_bytes * feature, query + 4 * feature, query_stride)
                scores_store(tile, weights + 4 * BLOCK * block, scale, keys + scales_at + 2 * BLOCK * group, group)
        for index in range(hidden(queries)):
            seen = min(CHUNK, length + index // heads - start)
            soften(weights + 4 * CHUNK * index, seen, states + index * state_bytes + 4 * head_size)
        # Positions that the first row does not see are added for those that do: a weight of 0 would turn a NaN there
        # into one here.
        seen_by_all = min(CHUNK, length - start)
        sum_of_values(cache + values_at, table, block_bytes, seen_by_all, weights, states)
        for index in range(heads, hidden(queries)):
            for position in range(max(seen_by_all, 0), min(CHUNK, length + index // heads - start)):
                values = cache + values_at + load_i32(table + 4 * (position // BLOCK)) * block_bytes
                weight = load_f32(weights + 4 * (CHUNK * index + position))
                add_value(values, position % BLOCK, weight, states + index * state_bytes)

    return chunk_of_tile


def _soften(level: str) -> Any:
    """Scores become weights: exponentials relative to the largest."""
    exp = simd.Operations(level).exp

    @inline_function
    def soften(scores: Any, seen: Any, largest_and_sum: Any) -> Any:
        lowest = types.float32(_LOWEST)
        best = simd.splat(lowest)
        for at in range(0, seen, simd.LANES):
            score = simd.keep_first(simd.load_f32x16(scores + 4 * at), seen - at, lowest)
            simd.store_f32x16(scores + 4 * at, score)
            best = simd.maximum(score, best)
        largest = simd.max_lanes(best)
        total = simd.splat(types.float32(0))
        for at in range(0, seen, simd.LANES):
            weight = exp(simd.subtract(simd.load_f32x16(scores + 4 * at), simd.splat(largest)))
            weight = simd.keep_first(weight, seen - at, types.float32(0))
            simd.store_f32x16(scores + 4 * at, weight)
            total = simd.add(total, weight)
        store_f32(largest_and_sum, largest)
        store_f32(largest_and_sum + 4, simd.sum_lanes(total))

    return soften


def _sum_of_values(level: str, head_size: int, queries: int, kv_type: str) -> Any:
    """The first `seen` values of a chunk, weighted, for each query: two vectors of features, which is a group of q8_0,
    at a time."""
    tiles = {vectors: weighted_values(level, head_size, queries, vectors, kv_type) for vectors in (1, 2)}
    zero, step, store = tiles[2]
    last_zero, last_step, last_store = tiles[1]
    times_scales = _times_scales(level, queries)
    layout = HeadLayout.of(kv_type, head_size)
    element_bytes, scales_at = layout.element_bytes, layout.value_scales - layout.values
    pairs = head_size // GROUP
    has_last = head_size % GROUP != 0
    has_scales = kv_type == Q8_0

    @inline_function
    def sum_of_values(values: Any, table: Any, block_bytes: Any, seen: Any, weights: Any, states: Any) -> Any:
        factors = weights
        for pair in range(pairs):
            if has_scales:
                factors = times_scales(weights, values + scales_at + 2 * BLOCK * pair, table, block_bytes, seen)
            tile = zero()
            for position in range(seen):
                block = load_i32(table + 4 * (position // BLOCK)) * block_bytes
                value = values + block + element_bytes * (head_size * (position % BLOCK) + GROUP * pair)
                tile = step(tile, value, factors + 4 * position)
            store(tile, states + 128 * pair)
        if has_last:
            if has_scales:
                factors = times_scales(weights, values + scales_at + 2 * BLOCK * pairs, table, block_bytes, seen)
            last = last_zero()
            for position in range(seen):
                block = load_i32(table + 4 * (position // BLOCK)) * block_bytes
                value = values + block + element_bytes * (head_size * (position % BLOCK) + GROUP * pairs)
                last = last_step(last, value, factors + 4 * position)
            last_store(last, states + 128 * pairs)

    return sum_of_values


def _times_scales(level: str, queries: int) -> Any:
    load_f16x16 = simd.Operations(level).load_f16x16

    @inline_function
    def times_scales(weights: Any, scales: Any, table: Any, block_bytes: Any, seen: Any) -> Any:
        """The weights of the first `seen` positions times the scales of a group; returns their address."""
        products = weights + 4 * queries * CHUNK
        for at in range(0, seen, simd.LANES):
            block = load_i32(table + 4 * (at // BLOCK)) * block_bytes
            scale = load_f16x16(scales + block + 2 * (at % BLOCK))
            for index in range(0, 4 * queries * CHUNK, 4 * CHUNK):
                weight = simd.load_f32x16(weights + index + 4 * at)
                simd.store_f32x16(products + index + 4 * at, simd.multiply(weight, scale))
        return products

    return times_scales


def _add_value(level: str, head_size: int, kv_type: str) -> Any:
    """One value, weighted, onto a state: the operations of `sum_of_values` on one position and one query."""
    fma = simd.Operations(level).fma
    load_value, load_scale = load_elements(level, kv_type), load_half(level)
    layout = HeadLayout.of(kv_type, head_size)
    element_bytes, scales_at = layout.element_bytes, layout.value_scales - layout.values
    has_scales = kv_type == Q8_0

    @inline_function
    def add_value(values: Any, slot: Any, weight: Any, state: Any) -> Any:
        for feature in range(0, head_size, simd.LANES):
            factor = weight
            if has_scales:
                factor = weight * load_scale(values + scales_at + 2 * (BLOCK * (feature // GROUP) + slot))
            value = load_value(values + element_bytes * (head_size * slot + feature))
            at = state + 4 * feature
            simd.store_f32x16(at, fma(simd.splat(factor), value, simd.load_f32x16(at)))

    return add_value


def attention_reference(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    scale: float,
    soft_cap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """One row: q float32[heads, head size], keys and values float32[length, KV heads, head size], the row's own
    position last; returns float32[heads, head size]. A plain softmax, exact where the kernel's runs in blocks.
    `soft_cap` and `sinks` as plan_ops.Attention has them."""
    import numpy as np

    group = len(q) // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,lhd->hl", q, keys, dtype=np.float32) * np.float32(scale)
    if soft_cap:
        scores = soft_cap_reference(scores, soft_cap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    weights = weights[:, : len(values)]
    result: NDArray[np.float32] = np.einsum("hl,lhd->hd", weights, values, dtype=np.float32)
    return result
