"""Attention over the paged KV cache (layouts/kv.py), in chunks of 128 positions.

For each chunk, chunk.py computes the scores, their maximum, the exponentials, their sum, and the weighted sum of the
values. Chunks are then merged in order of position (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). In
a step of few rows, the chunks are distributed among the threads (flash-decoding), and `merge` combines them. In a step
of many rows, each thread merges the chunks of its own rows. Both methods perform the same operations in the same order.
Chunks always begin at multiples of 128, even if the window does not, so a result depends only on the row's own
positions.

If a head has an attention sink, its state starts with the sink's score as the maximum, a weight of 1 and a zero value.

Query heads that share a KV head (GQA) and neighbouring rows form a tile. A tile loads each key and value from the CPU's
cache only once. In a step of few rows, rows of different sequences share a chunk if their block tables agree on it, as
they do in a common prefix. The chunk is then read once for all of them (cascade attention, as in Hydragen,
arXiv:2402.05099). In a step of many rows, a thread computes the tiles of a span of rows one chunk at a time, so that
the chunk stays in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import (
    BLOCK,
    CHUNK,
    KV_TYPES,
    Q8_0,
    SHARING_ROWS,
    SPAN_QUERIES,
    HeadLayout,
    Scratch,
    state_floats,
    tile_shape,
)
from llmrun.kernels.attention import integers
from llmrun.kernels.attention.chunk import WORDS, chunk_of_tile, prepare_chunk
from llmrun.kernels.attention.partials import (
    end_chunk,
    end_seen,
    first_chunk,
    first_seen,
    row_of_slot,
    seen_of_chunk,
    slots_before,
    slots_of_step,
)
from llmrun.kernels.attention.states import copy_state, states
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import hidden, load_f32, load_i32, load_i64
from llmrun.kernels.code.work import (
    PRIVATE_INPUT,
    PRIVATE_OUTPUT,
    block_tables,
    claim,
    first_item,
    n_rows,
    next_item,
    private_row,
    seen_ranges,
)
from llmrun.kernels.compiler import called_function, inline_function, kernel, kernel_family
from llmrun.model.plan.ops.attention import MergeWords

_MERGE = records.offsets(MergeWords)

_SPANS_PER_THREAD = 8  # work items, each for a span of rows and a tile of heads
_MERGED_HEADS = 4  # heads that a thread merges at a time


@kernel_family
def attention(level: str, head_size: int, value_size: int, group: int, keys: str, values: str) -> Callable[..., None]:
    """Build the kernel for attention, where `group` query heads share a KV head.

    `keys` and `values` are names of KV_TYPES.
    """
    return _attention(level, HeadLayout(KV_TYPES[keys], KV_TYPES[values], head_size, value_size), group, capped=False)


@kernel_family
def capped_attention(
    level: str, head_size: int, value_size: int, group: int, keys: str, values: str
) -> Callable[..., None]:
    """Build the kernel for attention with capped scores, cap * tanh(score / cap)."""
    return _attention(level, HeadLayout(KV_TYPES[keys], KV_TYPES[values], head_size, value_size), group, capped=True)


@inline_function
def _share(tables: Any, ranges: Any, row: Any, chunk: Any) -> Any:
    """Return whether a row and the next one can share a chunk.

    Rows of one sequence can share all chunks that both attend to. Rows of different sequences must attend to the whole
    chunk, because other entries of their block tables may be out of date.
    """
    one, other = load_i64(tables + 8 * row), load_i64(tables + 8 * row + 8)
    first = max(first_seen(ranges, row), first_seen(ranges, row + 1)) - chunk * CHUNK
    end = min(end_seen(ranges, row), end_seen(ranges, row + 1)) - chunk * CHUNK
    if one == other:
        return end > 0 and first < CHUNK
    if end < CHUNK or first > 0:
        return False
    for block in range(chunk * (CHUNK // BLOCK), (chunk + 1) * (CHUNK // BLOCK)):
        if load_i32(one + 4 * block) != load_i32(other + 4 * block):
            return False
    return True


@inline_function
def _rows_of_table(tables: Any, row: Any, count: Any) -> Any:
    """Return how many of `count` rows have the same block table as the first of them."""
    n = 1
    while n < count and load_i64(tables + 8 * (row + n)) == load_i64(tables + 8 * row):
        n += 1
    return n


def _attention(level: str, layout: HeadLayout, group: int, *, capped: bool) -> Callable[..., None]:
    """Build an attention kernel.

    In a step of few rows, each work item processes one chunk for the rows that share it and a tile of heads. Otherwise,
    it processes all chunks for a span of rows and a tile of heads.
    """
    heads, tile_rows, tiles = tile_shape(level, layout, group)
    fetch = _fetch(layout)
    prepare_queries, one_chunk, all_chunks = _work_items(level, layout, group, fetch, capped=capped)
    most_rows = SPAN_QUERIES // heads // tile_rows * tile_rows

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        head_tiles = load_i64(op + WORDS.kv_heads) * tiles
        query0 = load_i64(op + WORDS.q) + private_row(op, step, thread, PRIVATE_INPUT) * load_i64(op + WORDS.q_stride)
        scratch = load_i64(op + WORDS.scratch) + thread * load_i64(op + WORDS.scratch_bytes)
        tables = block_tables(step, load_i64(op + WORDS.tables))
        ranges = seen_ranges(step, load_i64(op + WORDS.reach))
        slots = slots_of_step(ranges, rows, load_i64(op + WORDS.slots))
        item = claim(op)
        if slots > 0:
            prepared = -1  # the tile, first row and number of rows whose queries are in the scratch memory
            expected = -1  # the item whose chunk has been prefetched
            while item < head_tiles * slots:
                tile, slot = item % head_tiles, item // head_tiles
                row = row_of_slot(ranges, slot)
                chunk = first_chunk(ranges, row) + slot - slots_before(ranges, row)
                if row % SHARING_ROWS == 0 or not _share(tables, ranges, row - 1, chunk):
                    count = 1
                    while (
                        row + count < rows
                        and (row + count) % SHARING_ROWS != 0
                        and _share(tables, ranges, row + count - 1, chunk)
                    ):
                        count += 1
                    table = load_i64(tables + 8 * row)
                    if item != expected:
                        fetch(op, table, ranges + 8 * row, chunk, tile // tiles)
                    # The other threads take the next items, so this thread's next item is probably n_threads later.
                    later = item + n_threads
                    ahead = _whole_chunk(table, ranges + 8 * row, chunk + later // head_tiles - slot)
                    expected = later if ahead != 0 else -1
                    ahead_head = later % head_tiles // tiles
                    queries = (tile * rows + row) * SHARING_ROWS + count
                    if queries != prepared:
                        prepare_queries(op, query0, row, count, tile, scratch)
                    prepared = queries
                    one_chunk(op, query0, table, ranges, row, count, tile, chunk, scratch, ahead, ahead_head)
                item = claim(op)
        else:
            # Heads are processed one after the other, so that a head's keys and values stay in the CPU cache. The last
            # rows of a head are processed first, because they take the longest in a long prompt. Spans are shorter if
            # there would otherwise be too few spans for the threads.
            spans = _SPANS_PER_THREAD * n_threads // head_tiles + 1
            span_rows = min(-(-rows // spans // tile_rows) * tile_rows, most_rows)
            n_spans = (rows + span_rows - 1) // span_rows
            while item < head_tiles * n_spans:
                tile, row = item // n_spans, (n_spans - 1 - item % n_spans) * span_rows
                end = min(row + span_rows, rows)
                while row < end:
                    count = _rows_of_table(tables, row, end - row)
                    all_chunks(op, query0, load_i64(tables + 8 * row), ranges, row, count, tile, scratch)
                    row += count
                item = claim(op)

    return run


@inline_function
def _whole_chunk(table: Any, ranges: Any, chunk: Any) -> Any:
    """Return the address of a chunk's part of a block table, or 0 if a row does not attend to the end of the chunk."""
    return table + 4 * chunk * (CHUNK // BLOCK) if (chunk + 1) * CHUNK <= end_seen(ranges, 0) else 0


def _fetch(layout: HeadLayout) -> Any:
    """Return a function that prefetches a chunk that a row attends to, or only its first block if keys are floats.

    Blocks lie anywhere in memory, so the processor cannot prefetch across them.
    """
    head_bytes, whole = layout.n_bytes, layout.keys is Q8_0

    @called_function
    def fetch(op: Any, table: Any, ranges: Any, chunk: Any, kv_head: Any) -> Any:
        first, end = seen_of_chunk(ranges, 0, chunk)
        cache, block_bytes = load_i64(op + WORDS.cache) + kv_head * head_bytes, load_i64(op + WORDS.block_bytes)
        of_chunk = table + 4 * chunk * (CHUNK // BLOCK)
        first_block, end_block = first // BLOCK, (end + BLOCK - 1) // BLOCK
        for block in range(first_block, end_block if whole else min(first_block + 1, end_block)):
            start = cache + load_i32(of_chunk + 4 * block) * block_bytes
            for line in range(0, head_bytes, records.CACHE_LINE):
                simd.prefetch_line(start + line)

    return fetch


def _work_items(level: str, layout: HeadLayout, group: int, fetch: Any, *, capped: bool) -> tuple[Any, Any, Any]:
    """Return (prepare_queries, one_chunk, all_chunks), functions for `count` rows and a tile of heads.

    `one_chunk` stores the states of one chunk in the slots of the rows, whose queries must have been prepared.
    `all_chunks` prepares the queries and writes the results. `tile` is an index into the tiles of all heads. The rows
    share the block table.
    """
    heads, tile_rows, tiles = tile_shape(level, layout, group)
    at, head_size, value_size = Scratch(layout.head_size, layout.value_size), layout.head_size, layout.value_size
    merged_at, later_at, state_bytes, query_bytes = at.merged, at.later, at.state_bytes, at.query_bytes
    prepare = prepare_chunk(level, layout)
    together = chunk_of_tile(level, layout, heads, tile_rows, prepare, capped=capped)
    alone = together if tile_rows == 1 else chunk_of_tile(level, layout, heads, 1, prepare, capped=capped)
    prepare_query = integers.prepare_query(level, head_size)
    has_integers = layout.keys is Q8_0
    begin, add, finish = states(level, layout.values, value_size)
    copy = copy_state(value_size)

    @inline_function
    def place_of(tile: Any) -> Any:
        """Return (KV head, first head of the tile, first head that is not in an earlier tile)."""
        kv_head, of_group = tile // tiles, tile % tiles * heads
        return kv_head, kv_head * group + min(of_group, group - heads), kv_head * group + of_group

    @called_function
    def prepare_queries(op: Any, query0: Any, row: Any, count: Any, tile: Any, scratch: Any) -> Any:
        """Write the integers of some rows' queries, which keys of 8 bits need, to the scratch memory."""
        if has_integers:
            _, head, _ = place_of(tile)
            stride = load_i64(op + WORDS.q_stride)
            query = query0 + row * stride + 4 * head_size * head
            for index in range(hidden(count * heads)):
                of_query = query + index // heads * stride + index % heads * 4 * head_size
                prepare_query(of_query, scratch + index * query_bytes, load_f32(op + WORDS.scale))

    @inline_function
    def queries_of_rows(op: Any, query0: Any, row: Any, head: Any, scratch: Any) -> Any:
        """Return the address of some rows' queries as the products need them, and the distance of the rows."""
        if has_integers:
            return scratch, heads * query_bytes
        stride = load_i64(op + WORDS.q_stride)
        return query0 + row * stride + 4 * head_size * head, stride

    @called_function
    def compute(
        op: Any,
        queries: Any,
        stride: Any,
        table: Any,
        ranges: Any,
        count: Any,
        done: Any,
        chunk: Any,
        kv_head: Any,
        scratch: Any,
        ahead: Any,
        ahead_head: Any,
    ) -> Any:
        """Compute the states of the next tile of rows after `done` rows. Return the tile's first row.

        The last tile begins early enough to be full, so it computes some rows again. Only the first tile prefetches and
        prepares, because later tiles find the chunk in the CPU's cache.
        """
        first = done
        ahead, prepared = (ahead, count) if done == 0 else (0, 0)
        if tile_rows > 1 and count >= tile_rows:
            first = min(done, count - tile_rows)
            together(
                op,
                queries + first * stride,
                table,
                ranges + 8 * first,
                chunk,
                kv_head,
                scratch,
                ahead,
                ahead_head,
                prepared,
            )
        else:
            alone(
                op,
                queries + first * stride,
                table,
                ranges + 8 * first,
                chunk,
                kv_head,
                scratch,
                ahead,
                ahead_head,
                prepared,
            )
        return first

    @called_function
    def one_chunk(
        op: Any,
        query0: Any,
        table: Any,
        ranges: Any,
        row: Any,
        count: Any,
        tile: Any,
        chunk: Any,
        scratch: Any,
        ahead: Any,
        ahead_head: Any,
    ) -> Any:
        kv_head, head, first_own = place_of(tile)
        queries, stride = queries_of_rows(op, query0, row, head, scratch)
        of_rows = ranges + 8 * row
        partials, partial_stride = load_i64(op + WORDS.partials), load_i64(op + WORDS.partial_stride)
        slot = slots_before(ranges, row)
        done = 0
        while done < count:
            first = compute(
                op, queries, stride, table, of_rows, count, done, chunk, kv_head, scratch, ahead, ahead_head
            )
            end = first + tile_rows if count >= tile_rows else first + 1
            for of_row in range(done, end):
                place = partials + (slot + chunk - first_chunk(of_rows, of_row)) * partial_stride
                slot += end_chunk(of_rows, of_row) - first_chunk(of_rows, of_row)
                state = scratch + later_at + (of_row - first) * heads * state_bytes
                for own in range(max(first_own - head, 0), hidden(heads)):
                    copy(state + own * state_bytes, place + (head + own) * state_bytes)
            done = end

    @called_function
    def all_chunks(op: Any, query0: Any, table: Any, ranges: Any, row: Any, count: Any, tile: Any, scratch: Any) -> Any:
        kv_head, head, first_own = place_of(tile)
        prepare_queries(op, query0, row, count, tile, scratch)
        queries, stride = queries_of_rows(op, query0, row, head, scratch)
        of_rows, merged = ranges + 8 * row, scratch + merged_at
        first_of_all, end_of_all = first_chunk(of_rows, 0), end_chunk(of_rows, 0)
        for of_row in range(count):
            first_of_all = min(first_of_all, first_chunk(of_rows, of_row))
            end_of_all = max(end_of_all, end_chunk(of_rows, of_row))
            for index in range(of_row * heads, hidden((of_row + 1) * heads)):
                begin(merged + index * state_bytes, load_i64(op + WORDS.sinks), head + index % heads)
        for chunk in range(first_of_all, end_of_all):
            if chunk == first_of_all:
                fetch(op, table, of_rows, chunk, kv_head)
            ahead = _whole_chunk(table, of_rows, chunk + 1)
            done = 0
            while done < count:
                first = compute(
                    op, queries, stride, table, of_rows, count, done, chunk, kv_head, scratch, ahead, kv_head
                )
                end = first + tile_rows if count >= tile_rows else first + 1
                for of_row in range(done, end):
                    if first_chunk(of_rows, of_row) <= chunk < end_chunk(of_rows, of_row):
                        for index in range(hidden(heads)):
                            state = scratch + later_at + ((of_row - first) * heads + index) * state_bytes
                            add(merged + (of_row * heads + index) * state_bytes, state)
                done = end
        out0, out_stride = load_i64(op + WORDS.out), load_i64(op + WORDS.out_stride)
        for of_row in range(count):
            out = out0 + (row + of_row) * out_stride + 4 * value_size * head
            for own in range(max(first_own - head, 0), hidden(heads)):
                finish(merged + (of_row * heads + own) * state_bytes, out + 4 * value_size * own)

    return prepare_queries, one_chunk, all_chunks


@kernel_family
def merge(level: str, value_size: int, values: str) -> Callable[..., None]:
    """Build the kernel that merges the chunks of every head and row in order, in a step that is split over chunks.

    `values` is the type of the values in the cache, a name of KV_TYPES.

    In a step of one row, every thread computes the results of all heads.
    """
    begin, add, finish = states(level, KV_TYPES[values], value_size)
    state_bytes = 4 * state_floats(value_size)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        ranges = seen_ranges(step, load_i64(op + _MERGE.reach))
        if slots_of_step(ranges, rows, load_i64(op + _MERGE.slots)) == 0:
            return
        heads = load_i64(op + _MERGE.heads)
        scratch = load_i64(op + _MERGE.scratch) + thread * load_i64(op + _MERGE.scratch_bytes)
        out_stride = load_i64(op + _MERGE.out_stride)
        out0 = load_i64(op + _MERGE.out) + private_row(op, step, thread, PRIVATE_OUTPUT) * out_stride
        partial_stride = load_i64(op + _MERGE.partial_stride)
        items_of_row = (heads + _MERGED_HEADS - 1) // _MERGED_HEADS
        n_items = rows * items_of_row
        item = first_item(op, step, thread, n_threads, n_items)
        while item < n_items:
            row, first = item // items_of_row, item % items_of_row * _MERGED_HEADS
            slot = slots_before(ranges, row)
            of_row = load_i64(op + _MERGE.partials) + slot * partial_stride
            for head in range(first, min(first + _MERGED_HEADS, heads)):
                state = of_row + head * state_bytes
                begin(scratch, load_i64(op + _MERGE.sinks), head)
                for _ in range(first_chunk(ranges, row), end_chunk(ranges, row)):
                    add(scratch, state)
                    state += partial_stride
                finish(scratch, out0 + row * out_stride + 4 * head * value_size)
            item = next_item(op, step, item, n_threads, n_items)

    return run
