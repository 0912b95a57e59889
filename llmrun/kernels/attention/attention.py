"""Attention over the paged KV cache (layouts/kv.py), in chunks of 128 positions.

For each chunk, chunk.py computes the scores, their maximum, the exponentials, their sum, and the weighted sum of the
values. Chunks are then merged in order of position (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). In
a step of few rows, the chunks are distributed among the threads (flash-decoding), and `merge` combines them. In a step
of many rows, each thread merges the chunks of its own rows. Both methods perform the same operations in the same order.
Chunks always begin at multiples of 128, even if the window does not, so a result depends only on the row's own
positions.

If a head has an attention sink, its state starts with the sink's score as the maximum, a weight of 1 and a zero value.

Query heads that share a KV head (GQA) and neighbouring rows form a tile. A key is converted to float32 only once per
tile. In a step of few rows, rows of different sequences share a chunk if their block tables agree on it, as they do in
a common prefix. The chunk is then read once for all of them (cascade attention, as in Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts import records
from llmrun.formats.layouts.kv import BLOCK, CHUNK, KV_TYPES, HeadLayout, TileShape, state_floats, tile_shape
from llmrun.kernels.attention.chunk import WORDS, chunk_of_tile
from llmrun.kernels.attention.partials import (
    end_chunk,
    end_seen,
    first_chunk,
    first_seen,
    row_of_slot,
    slots_before,
    slots_of_step,
)
from llmrun.kernels.attention.states import copy_state, states
from llmrun.kernels.code.load_store import hidden, load_i32, load_i64
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
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.model.plan.ops.attention import MergeWords

_MERGE = records.offsets(MergeWords)

# The most rows that share a chunk. A larger number would leave too few items for many threads.
_SHARING_ROWS = 8
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
    it processes all chunks for a tile of rows and a tile of heads.
    """
    shape = tile_shape(level, group)
    _, tile_rows, tiles = shape
    alone = _rows_of_tile(level, layout, shape._replace(rows=1), group, capped=capped)
    together = _rows_of_tile(level, layout, shape, group, capped=capped)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        head_tiles = load_i64(op + WORDS.kv_heads) * tiles
        query0 = load_i64(op + WORDS.q) + private_row(op, step, thread, PRIVATE_INPUT) * load_i64(op + WORDS.q_stride)
        scratch = load_i64(op + WORDS.scratch) + thread * load_i64(op + WORDS.scratch_bytes)
        tables = block_tables(step, load_i64(op + WORDS.tables))
        ranges = seen_ranges(step, load_i64(op + WORDS.reach))
        slots = slots_of_step(ranges, rows, load_i64(op + WORDS.slots))
        row_tiles = (rows + tile_rows - 1) // tile_rows
        units = slots if slots > 0 else row_tiles
        item = claim(op)
        while item < head_tiles * units:
            if slots > 0:
                tile, slot = item % head_tiles, item // head_tiles
                row = row_of_slot(ranges, slot)
                chunk = first_chunk(ranges, row) + slot - slots_before(ranges, row)
                count = 1
                if row % _SHARING_ROWS != 0 and _share(tables, ranges, row - 1, chunk):
                    count = 0
                else:
                    while (
                        row + count < rows
                        and (row + count) % _SHARING_ROWS != 0
                        and _share(tables, ranges, row + count - 1, chunk)
                    ):
                        count += 1
                fits = count >= tile_rows
            else:
                # Heads are processed one after the other, so that a head's keys and values stay in the CPU cache. The
                # last rows of a head are processed first, because they take the longest in a long prompt.
                tile, row = item // row_tiles, (row_tiles - 1 - item % row_tiles) * tile_rows
                chunk = -1
                count = min(tile_rows, rows - row)
                fits = _rows_of_table(tables, row, count) == tile_rows
            done = 0
            while done < count:
                if tile_rows > 1 and fits:
                    # The last tile begins early enough to be full. It computes some rows again.
                    first = row + min(done, count - tile_rows)
                    together(op, query0, load_i64(tables + 8 * first), ranges, first, tile, chunk, scratch)
                    done += tile_rows
                else:
                    first = row + done
                    alone(op, query0, load_i64(tables + 8 * first), ranges, first, tile, chunk, scratch)
                    done += 1
            item = claim(op)

    return run


def _rows_of_tile(level: str, layout: HeadLayout, shape: TileShape, group: int, *, capped: bool) -> Any:
    """Return a function that computes the attention of a tile.

    If `chunk` is negative, the function processes all chunks and writes the results. Otherwise, it processes one chunk
    and stores the states in the slots of its rows. `tile` counts the tiles of all heads.
    """
    heads, rows, tiles = shape
    head_size, value_size = layout.head_size, layout.value_size
    one_chunk = chunk_of_tile(level, layout, heads, rows, capped=capped)
    begin, add, finish = states(level, layout.values, value_size)
    copy = copy_state(value_size)
    queries = heads * rows
    state_bytes = 4 * state_floats(value_size)

    @inline_function
    def run(op: Any, query0: Any, table: Any, ranges: Any, row: Any, tile: Any, chunk: Any, scratch: Any) -> Any:
        kv_head = tile // tiles
        head = kv_head * group + min(tile % tiles * heads, group - heads)
        # Heads before this one belong to the tile before this one, too.
        first_own = kv_head * group + tile % tiles * heads
        query = query0 + row * load_i64(op + WORDS.q_stride) + 4 * head_size * head
        out = load_i64(op + WORDS.out) + row * load_i64(op + WORDS.out_stride) + 4 * value_size * head
        of_tile = ranges + 8 * row
        later = scratch + 2 * 4 * queries * CHUNK
        merged = later + queries * state_bytes
        start, end = chunk, chunk + 1
        if chunk < 0:
            start, end = first_chunk(of_tile, 0), end_chunk(of_tile, rows - 1)
            for index in range(hidden(queries)):
                begin(merged + index * state_bytes, load_i64(op + WORDS.sinks), head + index % heads)
        for number in range(start, end):
            one_chunk(op, query, table, of_tile, number, kv_head, scratch, later)
            slot = slots_before(ranges, row)
            for index in range(hidden(queries)):
                of_row, of_head = index // heads, index % heads
                first, after = first_chunk(of_tile, of_row), end_chunk(of_tile, of_row)
                state = later + index * state_bytes
                # This means `chunk < 0`, but if LLVM knew that, it would duplicate the loop around it.
                if hidden(chunk + number) < number:
                    if first <= number < after:
                        add(merged + index * state_bytes, state)
                elif head + of_head >= first_own:
                    place = load_i64(op + WORDS.partials) + (slot + number - first) * load_i64(
                        op + WORDS.partial_stride
                    )
                    copy(state, place + (head + of_head) * state_bytes)
                if of_head == heads - 1:
                    slot += after - first
        if chunk < 0:
            for index in range(hidden(queries)):
                of_row, of_head = index // heads, index % heads
                if head + of_head >= first_own:
                    to = out + of_row * load_i64(op + WORDS.out_stride) + of_head * 4 * value_size
                    finish(merged + index * state_bytes, to)

    return run


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
