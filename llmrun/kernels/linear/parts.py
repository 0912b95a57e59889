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

# While a thread multiplies weights, it prefetches later ones as several sequential streams. The hardware prefetcher
# recognizes only long sequential streams, and a core reads several of them faster than one. The table shows the
# bandwidth in GB/s for a matrix of 2,048 columns that is larger than the caches, on an AMD Zen 3 with AVX2, with chunks
# of 72 KB. These are medians of 20 alternating rounds with one thread, and of 8 with two:
#
#                                              Q4_0           Q8_0           Q4_K
#   threads                                   1      2       1      2       1      2
#   reading memory without computing       22.4   29.5    20.5   25.3    23.7   31.3
#   four streams of the next chunk         19.3   26.3    20.3   24.5    19.3   31.1
#   each plane of a group, 10 KB ahead     13.9   20.6    13.0   19.7    14.1   24.0
#
# Two streams and eight were slower than four in most runs. Prefetching only every second line halved the bandwidth.
STREAMS = 4

# The prefetch distance for values when a single row is multiplied, in bytes. It is rounded up, to equal units of a
# large group, or to several small groups. At this distance, weights are still in the L1 cache when they are used. A
# whole chunk, as in the table above, is too far for some processors. This table shows milliseconds per step on a Xeon
# (Emerald Rapids) with AVX-512 and 2 threads. The two pairs of rows were measured under different loads of the machine,
# so only rows of the same pair can be compared. SmolLM2 (Q4_1) has groups of 6 KB, the 1.24B models larger ones:
#
#                                            Q4_0   Q4_K_M   Q8_0   SmolLM2
#   the next chunk                           35.5     37.9   51.3      4.12
#   16 KB, in whole groups                   30.8     33.4   47.3      3.27
#
#   4 KB, in whole groups                    36.2     35.5   60.4      4.86
#   8 KB, in units of a group (this code)    31.6     36.5   53.1      4.92
#
# Tiles of several rows prefetch whole groups, because this needs fewer registers.
_UNIT_BYTES = 8 << 10


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


def linear_parts(level: str, packed: PackedType, row_indices: RowIndices) -> Parts:
    unpack_block = unpacking(level, packed)
    row_zero, row_block, row_store = single_row(level, packed)
    prefetch_unit, prefetch_group = _prefetch_unit(packed), _prefetch_group(packed)
    value_bytes, more_value_bytes = (64 * bits for bits in (*packed.planes, 0)[:2])
    panel_block = packed.panel_block_bytes

    @inline_function
    def group_at(op: Any, group: Any) -> Any:
        return load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)

    @inline_function
    def planes_of(op: Any, group: Any) -> Any:
        """Return the addresses of a group's planes."""
        base = group_at(op, group)
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
    def ahead_of(op: Any, group: Any, end: Any, following: Any) -> Any:
        """Return the address of the group to prefetch while a thread multiplies rows by `group`.

        The thread's chunk of groups ends at `end`, and its next chunk starts at `following`.
        """
        group_bytes = load_i64(op + PRODUCT.group_bytes)
        ahead = group + min((_UNIT_BYTES + group_bytes - 1) // group_bytes, load_i64(op + PRODUCT.chunk))
        return group_at(op, ahead if ahead < end else ahead - end + following)

    @inline_function
    def unit_blocks(op: Any) -> Any:
        """Return the number of blocks whose values are prefetched together."""
        n_blocks = load_i64(op + PRODUCT.blocks)
        n_units = max(load_i64(op + PRODUCT.group_bytes) // _UNIT_BYTES, 1)
        return (n_blocks + n_units - 1) // n_units

    @inline_function
    def unit_ahead(op: Any, values: Any, more_values: Any, following: Any, ahead: Any) -> Any:
        """Return the addresses of the values of the unit that starts with block `following`.

        If the group has no such block, they are those of the first unit of the group at `ahead`.
        """
        if following < load_i64(op + PRODUCT.blocks):
            return values + following * value_bytes, more_values + following * more_value_bytes
        return ahead + load_i64(op + PRODUCT.values), ahead + load_i64(op + PRODUCT.more_values)

    @inline_function
    def multiply_row(op: Any, group: Any, row: Any, to: Any, ahead: Any) -> Any:
        """Multiply a row by a group and store the result at `to`.

        Meanwhile, prefetch the values of the next unit (`unit_ahead`), and the scales of the group at `ahead`.
        """
        n_blocks, n_together = load_i64(op + PRODUCT.blocks), unit_blocks(op)
        scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
        x = row_of(op, row)
        total = row_zero()
        for unit in range(0, n_blocks, n_together):
            values_at, more_at = unit_ahead(op, values, more_values, unit + n_together, ahead)
            for block in range(unit, min(unit + n_together, n_blocks)):
                prefetch_unit(values_at, more_at, ahead, block - unit, block, n_together)
                total = row_block(total, block, scales, mins, upper_scales, upper_mins, values, more_values, x)
        row_store(total, to, load_i64(op + PRODUCT.adds))

    def multiplying(size: int) -> Any:
        """Return a function that multiplies a tile of up to `size` rows by a group."""
        rows_zero, rows_block, rows_store = few_rows(level, packed, size)
        indices_of = row_indices.indices(size)

        @inline_function
        def multiply_tile(op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any) -> Any:
            n_blocks, stride = load_i64(op + PRODUCT.blocks), load_i64(op + PRODUCT.group_bytes) // STREAMS
            scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
            x, x_stride = row_of(op, 0), load_i64(op + PRODUCT.x_stride)
            step = stride // n_blocks
            indices = indices_of(rows, count)
            totals = rows_zero()
            for block in range(n_blocks):
                prefetch_group(ahead, stride)
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
    def multiply_rows(op: Any, group: Any, rows: Any, count: Any, to: Any, ahead: Any) -> Any:
        """Multiply `count` rows by a group, and store the results at `to` and every `out_stride` bytes after it.

        `rows` is the word that selects the rows (RowIndices). Meanwhile, prefetch the whole group at `ahead`.
        """
        y_stride = load_i64(op + PRODUCT.out_stride)
        while count > small:
            multiply_large(op, group, rows, min(large, count), to, ahead)
            rows += large * row_step
            to += large * y_stride
            count -= large
        if count > 0:
            multiply_small(op, group, rows, count, to, ahead)

    @inline_function
    def prefetch_weights(op: Any, group: Any, n_groups: Any, part: Any, n_parts: Any) -> Any:
        """Prefetch one of `n_parts` equal parts of the weights of `n_groups` groups. `n_groups` may be 0."""
        n_lines = n_groups * load_i64(op + PRODUCT.group_bytes) // 64
        first = group_at(op, group)
        for line in range(part * n_lines // n_parts, (part + 1) * n_lines // n_parts):
            simd.prefetch_line(first + 64 * line)

    return Parts(unpack_group, multiply_row, multiply_rows, row_of, ahead_of, prefetch_weights)


def _prefetch_group(packed: PackedType) -> Any:
    """Return an intrinsic that prefetches one block's share of each stream of a group, in whole cache lines."""
    n_lines = -(-packed.whole_block_bytes // (STREAMS * records.CACHE_LINE))

    @intrinsic
    def prefetch(typingctx: Any, address: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, stride = args
            for _ in range(STREAMS):
                for line in range(n_lines):
                    simd.emit_prefetch(builder, simd.emit_offset(builder, address, records.CACHE_LINE * line))
                address = builder.add(address, stride)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return prefetch


def _prefetch_unit(packed: PackedType) -> Any:
    """Return an intrinsic that prefetches one block's share of the values of a unit, and of the scales of a group."""
    scale_bytes = packed.whole_block_bytes - 64 * packed.bits

    @intrinsic
    def prefetch(
        typingctx: Any, values: Any, more_values: Any, group: Any, number: Any, block: Any, n_blocks: Any
    ) -> Any:
        """Prefetch a share of the next unit while a block is multiplied.

        The block has the index `block` in its group and `number` in its unit, which has `n_blocks` blocks. `values` and
        `more_values` are the addresses of the next unit, and `group` is the address of the scales.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, more_values, group, number, block, n_blocks = args

            def emit_lines(address: Any, index: Any, n_bytes: int) -> None:
                at = builder.add(address, builder.mul(index, simd.I64(n_bytes)))
                for line in range(-(-n_bytes // records.CACHE_LINE)):
                    simd.emit_prefetch(builder, simd.emit_offset(builder, at, records.CACHE_LINE * line))

            # A block's share of each stream must be whole cache lines.
            n_streams = STREAMS if packed.planes[0] % STREAMS == 0 else 1
            n_bytes = 64 * packed.planes[0] // n_streams
            for stream in range(n_streams):
                ahead = builder.mul(n_blocks, simd.I64(stream * n_bytes))
                emit_lines(builder.add(values, ahead), number, n_bytes)
            if len(packed.planes) > 1:
                emit_lines(more_values, number, 64 * packed.planes[1])
            emit_lines(group, block, scale_bytes)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return prefetch
