"""Functions shared by both kernels for packed integer weights, linear/int8.py and experts/int8.py.

They compute the addresses of weights and rows, unpack a group, multiply a row by a group, and prefetch weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import few_row_tiles
from llmrun.formats.layouts.records import PREFETCH_LINEAR, PREFETCH_NONE, PREFETCH_STREAMS
from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.kernels.linear.few_rows import consecutive_rows, few_rows, numbered_rows
from llmrun.kernels.linear.tiles import single_row, unpacking
from llmrun.model.plan.ops.linear import IntegerWords

PRODUCT = records.offsets(IntegerWords)

# While a thread multiplies a chunk of weights, it prefetches its next chunk as several sequential streams, or the
# weights a few kilobytes ahead, or nothing. backends/cpu/prefetching.py chooses the way and has the measurements. Long
# streams are faster, because hardware prefetchers then run ahead as well: one thread of a Zen 3 read Q4_0 at 7.3 GB/s
# with streams of 2 KB, at 9.1 with 4.5 KB, and at 12.6 with 18 KB, a quarter of a 72 KB chunk. Two streams were as fast
# as four, and eight were slower.
_STREAMS = 4
_AHEAD_BYTES = 4 << 10


class Parts(NamedTuple):
    """Inline functions for kernels with packed integer weights."""

    unpack_group: Any
    multiply_row: Any
    multiply_rows: Any
    row_of: Any
    ahead_of: Any
    prefetch_weights: Any


class RowIndices(NamedTuple):
    """Describes the word that tells a kernel which rows to multiply.

    indices  function that maps a tile's number of rows to an intrinsic, which converts (word, number of rows) to the
             rows' indices
    step     the difference between the words of two consecutive rows
    """

    indices: Callable[[int], Any]
    step: int


CONSECUTIVE = RowIndices(consecutive_rows, 1)  # the word is the index of the first row
NUMBERED = RowIndices(numbered_rows, 4)  # the word is the address of the rows' indices, int32


@inline_function
def prefetch_way(step: Any, rows: Any) -> Any:
    """Return how to prefetch weights that are multiplied by `rows` rows (records.PREFETCH_...).

    Multiplying several rows takes longer per byte of weights, so prefetching helps even on processors where a single
    row is fastest without it. On a Zen 4, linear prefetching raised the rate at which weights are read for two rows
    from 20.0 to 24.2 GB/s (Q8_0, one thread), and from 23.5 to 25.2 (Q4_K, two threads).
    """
    way = load_i64(step + records.STEP_PREFETCH)
    if rows > 1 and way == PREFETCH_NONE:
        return PREFETCH_LINEAR
    return way


def linear_parts(level: str, packed: PackedType, row_indices: RowIndices) -> Parts:
    unpack_block = unpacking(level, packed)
    row_zero, row_block, row_store = single_row(level, packed)
    block_bytes, segment_blocks = packed.whole_block_bytes, packed.segment_blocks
    share = -(-block_bytes // _STREAMS)
    prefetch_shares = _prefetch_shares(share)
    panel_block = packed.panel_block_bytes

    @inline_function
    def group_at(op: Any, group: Any) -> Any:
        return load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)

    @inline_function
    def row_of(op: Any, row: Any) -> Any:
        """Return the address of a quantized row."""
        return load_i64(op + PRODUCT.x) + row * load_i64(op + PRODUCT.x_stride)

    @inline_function
    def unpack_group(op: Any, group: Any, panel: Any) -> Any:
        weights = group_at(op, group)
        n_blocks = load_i64(op + PRODUCT.blocks)
        for first in range(0, n_blocks, segment_blocks):
            for block in range(first, min(first + segment_blocks, n_blocks)):
                unpack_block(weights, first, block, panel + block * panel_block)

    @inline_function
    def ahead_of(op: Any, way: Any, group: Any, following: Any) -> Any:
        """Return (ahead, advance, stride): what to prefetch while a thread multiplies a chunk of groups.

        The chunk starts at `group`, and the thread's next chunk at `following`. For each block, the kernel prefetches
        one share per stream: the first is at `ahead`, and the others follow every `stride` bytes. After each block,
        `ahead` advances by `advance` bytes. To prefetch nothing, all shares are at the start of the chunk, which is in
        the cache anyway. A branch would make LLVM compile every loop twice.
        """
        if way == PREFETCH_STREAMS:
            stride = load_i64(op + PRODUCT.chunk) * load_i64(op + PRODUCT.group_bytes) // _STREAMS
            return group_at(op, following), share, stride
        if way == PREFETCH_LINEAR:
            return group_at(op, group) + _AHEAD_BYTES, block_bytes, share
        return group_at(op, group), 0, 0

    @inline_function
    def multiply_row(op: Any, group: Any, row: Any, to: Any, ahead: Any, advance: Any, stride: Any) -> Any:
        """Multiply a row by a group and store the result at `to`. The last three arguments come from `ahead_of`."""
        weights, x = group_at(op, group), row_of(op, row)
        n_blocks = load_i64(op + PRODUCT.blocks)
        total = row_zero()
        for first in range(0, n_blocks, segment_blocks):
            for block in range(first, min(first + segment_blocks, n_blocks)):
                prefetch_shares(ahead, stride)
                ahead += advance
                total = row_block(total, weights, first, block, x)
        row_store(total, to, load_i64(op + PRODUCT.adds))

    def multiplying(size: int) -> Any:
        """Return a function that multiplies a tile of up to `size` rows by a group."""
        rows_zero, rows_block, rows_store = few_rows(level, packed, size)
        indices_of = row_indices.indices(size)

        @inline_function
        def multiply_tile(
            op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any, advance: Any, stride: Any
        ) -> Any:
            weights = group_at(op, group)
            x, x_stride = row_of(op, 0), load_i64(op + PRODUCT.x_stride)
            indices = indices_of(rows, count)
            totals = rows_zero()
            n_blocks = load_i64(op + PRODUCT.blocks)
            for first in range(0, n_blocks, segment_blocks):
                for block in range(first, min(first + segment_blocks, n_blocks)):
                    prefetch_shares(ahead, stride)
                    ahead += advance
                    totals = rows_block(totals, weights, first, block, x, x_stride, indices)
            rows_store(totals, to, load_i64(op + PRODUCT.out_stride), count, load_i64(op + PRODUCT.adds))

        return multiply_tile

    large, small = few_row_tiles(level)
    row_step = row_indices.step
    multiply_large, multiply_small = multiplying(large), multiplying(small)

    @called_function
    def multiply_rows(
        op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any, advance: Any, stride: Any
    ) -> Any:
        """Multiply `count` rows by a group, and store the results at `to` and every `out_stride` bytes after it.

        `rows` is the word that selects the rows (RowIndices). The last three arguments come from `ahead_of`.
        """
        y_stride = load_i64(op + PRODUCT.out_stride)
        while count > small:
            multiply_large(op, group, rows, min(large, count), to, ahead, advance, stride)
            rows += large * row_step
            to += large * y_stride
            count -= large
        if count > 0:
            multiply_small(op, group, rows, count, to, ahead, advance, stride)

    @inline_function
    def prefetch_weights(op: Any, group: Any, n_groups: Any, part: Any, n_parts: Any) -> Any:
        """Prefetch one of `n_parts` equal parts of the weights of `n_groups` groups. `n_groups` may be 0."""
        n_lines = n_groups * load_i64(op + PRODUCT.group_bytes) // 64
        first = group_at(op, group)
        for line in range(part * n_lines // n_parts, (part + 1) * n_lines // n_parts):
            simd.prefetch_line(first + 64 * line)

    return Parts(unpack_group, multiply_row, multiply_rows, row_of, ahead_of, prefetch_weights)


def _prefetch_shares(share: int) -> Any:
    """Return an intrinsic that prefetches `share` bytes of each stream: at `address`, and every `stride` bytes on."""

    @intrinsic
    def prefetch(typingctx: Any, address: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, stride = args
            for _ in range(_STREAMS):
                for line in range(0, share, records.CACHE_LINE):
                    simd.emit_prefetch(builder, simd.emit_offset(builder, address, line))
                address = builder.add(address, stride)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return prefetch
