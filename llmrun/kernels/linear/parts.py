"""Functions shared by both kernels for packed integer weights, linear/int8.py and experts/int8.py.

They compute the addresses of weights and rows, unpack a group, multiply a row by a group, and prefetch weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd, unpack
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.compiler import inline_function
from llmrun.kernels.linear.tiles import single_row, unpacking
from llmrun.layouts import records
from llmrun.plan.ops.linear import IntegerWords
from llmrun.quants.packed import PackedType

PRODUCT = records.offsets(IntegerWords)

# The prefetch distance when a single row is multiplied. The planes of a group are several streams that end and restart
# every 20 KB, so the hardware prefetcher detects them too late. The table shows the bandwidth in GB/s for a
# 60,000 x 2,048 matrix on 2 threads. Reading memory without computing reaches 48 GB/s.
#
#   distance   one block   6 KB   8 KB   12 KB
#   Q4_0              26     46     48      51
#   Q6_K              33     42     42      45
LEAD_BYTES = 10 << 10


class Parts(NamedTuple):
    """Inline functions for kernels with packed integer weights."""

    unpack_group: Any
    multiply_row: Any
    activations_of: Any
    prefetch_weights: Any


def linear_parts(level: str, packed: PackedType) -> Parts:
    unpack_block = unpacking(level, packed)
    row_zero, row_block, row_store = single_row(level, packed)
    prefetch = _prefetch(packed)
    lead_blocks = max(1, LEAD_BYTES // packed.block_bytes)
    panel_block = packed.panel_block_bytes

    @inline_function
    def planes_of(op: Any, group: Any) -> Any:
        """Return the addresses of a group's planes."""
        base = load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)
        upper_scales, upper_mins = base + load_i64(op + PRODUCT.upper_scales), base + load_i64(op + PRODUCT.upper_mins)
        values, more_values = base + load_i64(op + PRODUCT.values), base + load_i64(op + PRODUCT.more_values)
        return base, base + load_i64(op + PRODUCT.mins), upper_scales, upper_mins, values, more_values

    @inline_function
    def activations_of(op: Any, row: Any) -> Any:
        """Return the addresses of a quantized row's integers, scales, offsets, sums and half sums."""
        at = row * load_i64(op + PRODUCT.scale_stride)
        x = load_i64(op + PRODUCT.x) + row * load_i64(op + PRODUCT.x_stride)
        scales, offsets = load_i64(op + PRODUCT.scales) + at, load_i64(op + PRODUCT.offsets) + at
        return x, scales, offsets, load_i64(op + PRODUCT.sums) + at, load_i64(op + PRODUCT.half_sums) + 2 * at

    @inline_function
    def unpack_group(op: Any, group: Any, panel: Any) -> Any:
        scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
        for block in range(load_i64(op + PRODUCT.blocks)):
            to = panel + block * panel_block
            unpack_block(block, scales, mins, upper_scales, upper_mins, values, more_values, to)

    @inline_function
    def multiply_row(op: Any, group: Any, next_group: Any, row: Any, to: Any) -> Any:
        """Multiply a row by a group and store the result at `to`. Near the end, prefetch weights of `next_group`."""
        n_blocks = load_i64(op + PRODUCT.blocks)
        to_next = (next_group - group) * load_i64(op + PRODUCT.group_bytes)
        scales, mins, upper_scales, upper_mins, values, more_values = planes_of(op, group)
        x, x_scales, x_offsets, x_sums, x_half_sums = activations_of(op, row)
        lead = min(lead_blocks, n_blocks)
        total = row_zero()
        for block in range(n_blocks):
            ahead = block + lead
            shift = 0
            if ahead >= n_blocks:
                ahead -= n_blocks
                shift = to_next
            prefetch(ahead, scales + shift, mins + shift, values + shift, more_values + shift)
            total = row_block(
                *(total, block, scales, mins, upper_scales, upper_mins, values, more_values),
                *(x, x_scales, x_offsets, x_sums, x_half_sums),
            )
        row_store(total, to, load_i64(op + PRODUCT.adds))

    @inline_function
    def prefetch_weights(op: Any, group: Any, n_groups: Any, part: Any, n_parts: Any) -> Any:
        """Prefetch one of `n_parts` equal parts of the weights of `n_groups` groups. `n_groups` may be 0."""
        n_lines = n_groups * load_i64(op + PRODUCT.group_bytes) // 64
        first = load_i64(op + PRODUCT.weights) + group * load_i64(op + PRODUCT.group_bytes)
        for line in range(part * n_lines // n_parts, (part + 1) * n_lines // n_parts):
            simd.prefetch_line(first + 64 * line)

    return Parts(unpack_group, multiply_row, activations_of, prefetch_weights)


def _prefetch(packed: PackedType) -> Any:
    @intrinsic
    def prefetch(typingctx: Any, block: Any, scales: Any, mins: Any, values: Any, more_values: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            block, scales, mins, values, more_values = args
            nowhere = simd.I64(0)
            planes = unpack.Planes(scales, mins, nowhere, nowhere, values, more_values)
            unpack.emit_prefetches(builder, packed, planes, block)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return prefetch
