"""Functions shared by both kernels for packed integer weights, linear/int8.py and experts/int8.py.

They compute the addresses of weights and rows, unpack a group, multiply a row by a group, and prefetch weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.kernels.linear.few_rows import consecutive_rows, few_rows, numbered_rows
from llmrun.kernels.linear.tiles import single_row, unpacking
from llmrun.layouts import records
from llmrun.layouts.tile_shapes import few_row_tiles
from llmrun.plan.ops.linear import IntegerWords
from llmrun.quants.packed import PackedType

PRODUCT = records.offsets(IntegerWords)

# While a thread multiplies a chunk of weights by a single row, it prefetches its next chunk as this many sequential
# streams. The hardware prefetcher recognizes only long sequential streams, and a core reads several of them faster than
# one. The table shows the bandwidth in GB/s for a matrix of 2,048 columns that is larger than the caches, on an AMD
# Zen 3 with AVX2, with chunks of 72 KB. These are medians of 20 alternating rounds with one thread, and of 8 with two:
#
#                                              Q4_0           Q8_0           Q4_K
#   threads                                   1      2       1      2       1      2
#   reading memory without computing       22.4   29.5    20.5   25.3    23.7   31.3
#   four streams of the next chunk         19.3   26.3    20.3   24.5    19.3   31.1
#   each plane of a group, 10 KB ahead     13.9   20.6    13.0   19.7    14.1   24.0
#
# Two streams and eight were slower than four in most runs. A distance of 2 to 16 KB within each plane made no
# difference. Prefetching only every second line halved the bandwidth.
STREAMS = 4


class Parts(NamedTuple):
    """Inline functions for kernels with packed integer weights."""

    unpack_group: Any
    multiply_row: Any
    multiply_rows: Any
    stream_bytes: Any
    row_of: Any
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


def linear_parts(level: str, packed: PackedType, row_indices: RowIndices) -> Parts:
    unpack_block = unpacking(level, packed)
    row_zero, row_block, row_store = single_row(level, packed)
    prefetch = _prefetch(packed)
    panel_block = packed.panel_block_bytes

    @inline_function
    def planes_of(op: Any, group: Any) -> Any:
        """Return the addresses of a group's planes."""
        base = load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)
        upper_scales, upper_mins = base + load_i64(op + PRODUCT.upper_scales), base + load_i64(op + PRODUCT.upper_mins)
        values, more_values = base + load_i64(op + PRODUCT.values), base + load_i64(op + PRODUCT.more_values)
        return base, base + load_i64(op + PRODUCT.mins), upper_scales, upper_mins, values, more_values

    @inline_function
    def row_of(op: Any, row: Any) -> Any:
        """Return the address of a quantized row."""
        return load_i64(op + PRODUCT.x) + row * load_i64(op + PRODUCT.x_stride)

    @inline_function
    def unpack_group(op: Any, group: Any, panel: Any) -> Any:
        scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
        for block in range(load_i64(op + PRODUCT.blocks)):
            to = panel + block * panel_block
            unpack_block(block, scales, mins, upper_scales, upper_mins, values, more_values, to)

    @inline_function
    def stream_bytes(op: Any, n_groups: Any) -> Any:
        """Return the size in bytes of each stream when the weights of `n_groups` groups are prefetched."""
        return n_groups * load_i64(op + PRODUCT.group_bytes) // STREAMS

    @inline_function
    def multiply_row(op: Any, group: Any, row: Any, to: Any, ahead: Any, stride: Any) -> Any:
        """Multiply a row by a group and store the result at `to`.

        Meanwhile, prefetch `stream_bytes(op, 1)` bytes of each stream. The first stream is at `ahead`, and each further
        stream is `stride` bytes after the previous one.
        """
        n_blocks = load_i64(op + PRODUCT.blocks)
        scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
        x = row_of(op, row)
        step = stream_bytes(op, 1) // n_blocks
        total = row_zero()
        for block in range(n_blocks):
            prefetch(ahead, stride)
            ahead += step
            total = row_block(total, block, scales, mins, upper_scales, upper_mins, values, more_values, x)
        row_store(total, to, load_i64(op + PRODUCT.adds))

    def multiplying(size: int) -> Any:
        """Return a function that multiplies a tile of up to `size` rows by a group."""
        rows_zero, rows_block, rows_store = few_rows(level, packed, size)
        indices_of = row_indices.indices(size)

        @inline_function
        def multiply_tile(op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any, stride: Any) -> Any:
            n_blocks = load_i64(op + PRODUCT.blocks)
            scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
            x, x_stride = row_of(op, 0), load_i64(op + PRODUCT.x_stride)
            step = stream_bytes(op, 1) // n_blocks
            indices = indices_of(rows, count)
            totals = rows_zero()
            for block in range(n_blocks):
                prefetch(ahead, stride)
                ahead += step
                totals = rows_block(
                    *(totals, block, scales, mins, upper_scales, upper_mins, values, more_values),
                    *(x, x_stride, indices),
                )
            rows_store(totals, to, load_i64(op + PRODUCT.out_stride), count, load_i64(op + PRODUCT.adds))

        return multiply_tile

    large, small = few_row_tiles(level)
    row_step = row_indices.step
    multiply_large, multiply_small = multiplying(large), multiplying(small)

    @called_function
    def multiply_rows(op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any, stride: Any) -> Any:
        """Multiply `count` rows by a group, and store the results at `to` and every `out_stride` bytes after it.

        `rows` is the word that tells which rows (RowIndices). Prefetches as `multiply_row` does.
        """
        y_stride = load_i64(op + PRODUCT.out_stride)
        while count > small:
            multiply_large(op, group, rows, min(large, count), to, ahead, stride)
            rows += large * row_step
            to += large * y_stride
            count -= large
        if count > 0:
            multiply_small(op, group, rows, count, to, ahead, stride)

    @inline_function
    def prefetch_weights(op: Any, group: Any, n_groups: Any, part: Any, n_parts: Any) -> Any:
        """Prefetch one of `n_parts` equal parts of the weights of `n_groups` groups. `n_groups` may be 0."""
        n_lines = n_groups * load_i64(op + PRODUCT.group_bytes) // 64
        first = load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)
        for line in range(part * n_lines // n_parts, (part + 1) * n_lines // n_parts):
            simd.prefetch_line(first + 64 * line)

    return Parts(unpack_group, multiply_row, multiply_rows, stream_bytes, row_of, prefetch_weights)


def _prefetch(packed: PackedType) -> Any:
    """Return an intrinsic that prefetches one block's share of each stream, rounded up to whole cache lines."""
    n_lines = -(-packed.whole_block_bytes // (STREAMS * records.CACHE_LINE))

    @intrinsic
    def prefetch(typingctx: Any, ahead: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, stride = args
            for _ in range(STREAMS):
                for line in range(n_lines):
                    simd.emit_prefetch(builder, simd.emit_offset(builder, address, records.CACHE_LINE * line))
                address = builder.add(address, stride)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return prefetch
