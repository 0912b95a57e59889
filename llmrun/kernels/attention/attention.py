"""Attention over the paged KV cache (kv_blocks.py), in chunks of 128 positions.

For each chunk, chunk.py computes the scores, their maximum, the exponentials, their sum, and the weighted sum of the
values. Chunks are then merged in order of position (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). In
a step of one row, the chunks are distributed among the threads, and `merge` combines them. In a step of many rows, each
thread merges the chunks of its own rows. Both methods perform the same operations in the same order. Chunks always
begin at multiples of 128, even if the window does not, so a result depends only on the row's own positions.

If a head has an attention sink, its state starts with the sink's score as the maximum, a weight of 1 and a zero value.

Query heads that share a KV head (GQA) and consecutive rows of a sequence form a tile. A key is converted to float32
only once per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from llmrun.kernels.attention.chunk import LOWEST, WORDS, chunk_of_tile
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64, store_f32
from llmrun.kernels.code.work import PRIVATE_INPUT, PRIVATE_OUTPUT, block_tables, claim, n_rows, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.layouts import records
from llmrun.layouts.attention import CHUNK, NARROW_TILE_QUERIES, TILE_QUERIES, state_floats
from llmrun.layouts.kv_blocks import HeadLayout
from llmrun.plan.ops.attention import MergeWords

_MERGE = records.offsets(MergeWords)


@kernel_family
def attention(level: str, head_size: int, value_size: int, group: int, kv_type: str) -> Callable[..., None]:
    """Build the kernel for causal attention, where `group` query heads share a KV head."""
    return _attention(level, HeadLayout(kv_type, head_size, value_size), group, capped=False)


@kernel_family
def capped_attention(level: str, head_size: int, value_size: int, group: int, kv_type: str) -> Callable[..., None]:
    """Build the kernel for causal attention with capped scores, cap * tanh(score / cap)."""
    return _attention(level, HeadLayout(kv_type, head_size, value_size), group, capped=True)


@inline_function
def _first_chunk(length: Any, window: Any) -> Any:
    """Return the index of the first chunk that a row needs if it attends to the last `window` of `length` positions."""
    return max(length - window, 0) // CHUNK


@inline_function
def _end_chunk(length: Any) -> Any:
    return (length + CHUNK - 1) // CHUNK


def _attention(level: str, layout: HeadLayout, group: int, *, capped: bool) -> Callable[..., None]:
    """Build an attention kernel.

    In a step of one row, each work item processes one chunk for a tile of heads. Otherwise, it processes a tile of rows
    for a tile of heads.
    """
    heads = _tile_heads(level, group)
    tile_rows = _tile_queries(level) // heads
    query_bytes, out_bytes = 4 * heads * layout.head_size, 4 * heads * layout.value_size
    state_bytes = 4 * state_floats(layout.value_size)
    one_row = _all_chunks(level, layout, heads, 1, capped=capped)
    many_rows = _all_chunks(level, layout, heads, tile_rows, capped=capped)
    one_chunk = chunk_of_tile(level, layout, heads, 1, capped=capped)

    @inline_function
    def follow(tables: Any, positions: Any, row: Any) -> Any:
        """Return whether the rows of a tile are consecutive positions of one sequence."""
        for index in range(row + 1, row + tile_rows):
            if load_i64(tables + 8 * index) != load_i64(tables + 8 * row):
                return False
            if load_i32(positions + 4 * index) != load_i32(positions + 4 * row) + index - row:
                return False
        return True

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        head_tiles = load_i64(op + WORDS.kv_heads) * (group // heads)
        query_stride = load_i64(op + WORDS.q_stride)
        out_stride = load_i64(op + WORDS.out_stride)
        query0 = load_i64(op + WORDS.q) + private_row(op, step, thread, PRIVATE_INPUT) * query_stride
        scratch = load_i64(op + WORDS.scratch) + thread * load_i64(op + WORDS.scratch_bytes)
        tables = block_tables(step, load_i64(op + WORDS.tables))
        positions = load_i64(step + records.STEP_POSITIONS)
        item = claim(op)
        if rows == 1:
            length = load_i32(positions) + 1
            first_chunk = _first_chunk(length, load_i64(op + WORDS.window))
            while item < head_tiles * (_end_chunk(length) - first_chunk):
                tile = item % head_tiles
                chunk = item // head_tiles
                states = load_i64(op + WORDS.partials) + chunk * load_i64(op + WORDS.partial_stride)
                states += tile * heads * state_bytes
                chunk += first_chunk
                kv_head = tile * heads // group
                one_chunk(op, query0 + tile * query_bytes, load_i64(tables), length, chunk, kv_head, scratch, states)
                item = claim(op)
            return
        row_tiles = (rows + tile_rows - 1) // tile_rows
        while item < head_tiles * row_tiles:
            # Heads are processed one after the other, so that a head's keys and values stay in the CPU cache. The last
            # rows of a head are processed first, because they take the longest in a long prompt.
            first = (row_tiles - 1 - item % row_tiles) * tile_rows
            tile = item // row_tiles
            head = tile * heads
            query = query0 + first * query_stride + tile * query_bytes
            out = load_i64(op + WORDS.out) + first * out_stride + tile * out_bytes
            if first + tile_rows <= rows and follow(tables, positions, first):
                length = load_i32(positions + 4 * first) + 1
                many_rows(op, query, out, load_i64(tables + 8 * first), length, head, head // group, scratch)
            else:
                for row in range(first, min(first + tile_rows, rows)):
                    table = load_i64(tables + 8 * row)
                    length = load_i32(positions + 4 * row) + 1
                    one_row(op, query, out, table, length, head, head // group, scratch)
                    query += query_stride
                    out += out_stride
            item = claim(op)

    return run


@kernel_family
def merge(level: str, value_size: int) -> Callable[..., None]:
    """Build the kernel that merges the chunks of every head in order, in a step of one row.

    Every thread computes the results of all heads.
    """
    begin, add, finish = _states(level, value_size)
    state_bytes = 4 * state_floats(value_size)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        if n_rows(op, step) == 1:
            scratch = load_i64(op + _MERGE.scratch) + thread * load_i64(op + _MERGE.scratch_bytes)
            out_stride = load_i64(op + _MERGE.out_stride)
            out = load_i64(op + _MERGE.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * out_stride
            length = load_i32(load_i64(step + records.STEP_POSITIONS)) + 1
            for head in range(load_i64(op + _MERGE.heads)):
                state = load_i64(op + _MERGE.partials) + head * state_bytes
                begin(scratch, load_i64(op + _MERGE.sinks), head)
                for _ in range(_first_chunk(length, load_i64(op + _MERGE.window)), _end_chunk(length)):
                    add(scratch, state)
                    state += load_i64(op + _MERGE.partial_stride)
                finish(scratch, out + 4 * head * value_size)

    return run


def _tile_queries(level: str) -> int:
    return TILE_QUERIES.get(level, NARROW_TILE_QUERIES)


def _tile_heads(level: str, group: int) -> int:
    """Return the number of query heads per tile that share a KV head."""
    return max(n for n in range(1, _tile_queries(level) + 1) if group % n == 0)


def _states(level: str, value_size: int) -> tuple[Any, Any, Any]:
    """Return (begin, add, finish) for the state of a query.

    The state consists of the weighted sum of the values [value size], the maximum score, and the sum of the weights.
    """
    operations = simd.Operations(level)
    fma, exp = operations.fma, operations.exp
    largest_at, sum_at = 4 * value_size, 4 * value_size + 4

    @inline_function
    def begin(state: Any, sinks: Any, head: Any) -> Any:
        """Initialize a state. `sinks` is the address of all heads' attention sinks, or 0 if there are none."""
        for at in range(0, 4 * value_size, 64):
            simd.store_f32x16(state + at, simd.splat(types.float32(0)))
        if sinks != 0:
            store_f32(state + largest_at, load_f32(sinks + 4 * head))
            store_f32(state + sum_at, types.float32(1))
        else:
            store_f32(state + largest_at, types.float32(LOWEST))
            store_f32(state + sum_at, types.float32(0))

    @inline_function
    def add(state: Any, later: Any) -> Any:
        """Merge the state of later positions into the state of earlier positions."""
        largest = max(load_f32(state + largest_at), load_f32(later + largest_at))
        faded = exp(simd.splat(load_f32(state + largest_at) - largest))
        weight = exp(simd.splat(load_f32(later + largest_at) - largest))
        for at in range(0, 4 * value_size, 64):
            before = simd.multiply(simd.load_f32x16(state + at), faded)
            simd.store_f32x16(state + at, fma(simd.load_f32x16(later + at), weight, before))
        total = load_f32(state + sum_at) * simd.first_lane(faded)
        store_f32(state + sum_at, total + load_f32(later + sum_at) * simd.first_lane(weight))
        store_f32(state + largest_at, largest)

    @inline_function
    def finish(state: Any, out: Any) -> Any:
        inverse = simd.splat(types.float32(1) / load_f32(state + sum_at))
        for at in range(0, 4 * value_size, 64):
            simd.store_f32x16(out + at, simd.multiply(simd.load_f32x16(state + at), inverse))

    return begin, add, finish


def _all_chunks(level: str, layout: HeadLayout, heads: int, rows: int, *, capped: bool) -> Any:
    """Return a function that computes the attention of `heads` x `rows` queries over all chunks.

    The function's `length` is the number of positions up to the first row. Each further row adds one position.
    """
    value_size = layout.value_size
    one_chunk = chunk_of_tile(level, layout, heads, rows, capped=capped)
    begin, add, finish = _states(level, value_size)
    queries = heads * rows
    state_bytes = 4 * state_floats(value_size)

    @inline_function
    def all_chunks(
        op: Any, query: Any, out: Any, table: Any, length: Any, head: Any, kv_head: Any, scratch: Any
    ) -> Any:
        later = scratch + 2 * 4 * queries * CHUNK
        states = later + queries * state_bytes
        window = load_i64(op + WORDS.window)
        for index in range(hidden(queries)):
            begin(states + index * state_bytes, load_i64(op + WORDS.sinks), head + index % heads)
        for chunk in range(_first_chunk(length, window), _end_chunk(length + rows - 1)):
            one_chunk(op, query, table, length, chunk, kv_head, scratch, later)
            for index in range(hidden(queries)):
                row_length = length + index // heads
                if _first_chunk(row_length, window) <= chunk < _end_chunk(row_length):
                    add(states + index * state_bytes, later + index * state_bytes)
        for index in range(hidden(queries)):
            to = out + index // heads * load_i64(op + WORDS.out_stride) + index % heads * 4 * value_size
            finish(states + index * state_bytes, to)

    return all_chunks
