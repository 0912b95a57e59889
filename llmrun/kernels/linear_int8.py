"""Matrix times rows, integer weights: y[row, n] = sum over k of weight[n, k] * x[row, k].

Weights are packed (pack.py) in groups of 16 outputs; rows are int8 per block of 32 (rowwise.quantize). Dot products of
a block, or of its halves, are exact integers; blocks are added in order of k as floats, so a value depends neither on
the tile nor on the thread that computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd, unpack
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.dots import bias_of, emit_dots
from llmrun.kernels.memory import load_i64
from llmrun.kernels.packed_types import PACKED_TYPES, PackedType
from llmrun.kernels.work import PRIVATE_INPUT, claim, n_rows, private_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
A_WEIGHTS, A_GROUPS, A_BLOCKS, A_GROUP_BYTES = (ARG + 8 * i for i in range(4))
A_MINS, A_UPPER_SCALES, A_UPPER_MINS, A_VALUES, A_MORE_VALUES = (ARG + 8 * i for i in range(4, 9))
A_X, A_X_STRIDE, A_SCALES, A_OFFSETS, A_SUMS, A_HALF_SUMS, A_SCALE_STRIDE = (ARG + 8 * i for i in range(9, 16))
A_Y, A_Y_STRIDE, A_ADD, A_CHUNK, A_LOGITS = (ARG + 8 * i for i in range(16, 21))

# A tile of 16 outputs x 8 rows keeps 8 accumulators, 8 unpacked weight vectors and 8 partial sums in 32 registers.
# 4 rows did as well, 12 and more spilled. Where vectors are 32 bytes and registers 16, smaller tiles do better.
WIDE_TILE = 8

# How far ahead of a single row's product the weights are asked for. The planes of a group are several streams that end
# and begin anew every 20 KB, which a processor's own prefetching follows late: 60,000 x 2,048 of Q4_0 and Q6_K on 2
# threads, GB/s, where plain reading took 48: one block ahead 26 and 33, 6 KB 46 and 42, 8 KB 48 and 42, 12 KB 51 and 45.
LEAD_BYTES = 10 << 10


@kernel_family
def linear(level: str, weight: str) -> Callable[..., None]:
    """`weight`: a name of PACKED_TYPES."""
    packed = PACKED_TYPES[weight]
    wide = WIDE_TILE if level == "avx512vnni" else 2
    many_zero, many_block, many_store = _tile(level, packed, wide)
    one_zero, one_block, one_store = _tile(level, packed, 1)
    prefetch = _prefetch(packed)
    lead_blocks = max(1, LEAD_BYTES // packed.block_bytes)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        n_groups = load_i64(op + A_GROUPS)
        n_blocks = load_i64(op + A_BLOCKS)
        lead = min(lead_blocks, n_blocks)
        group_bytes = load_i64(op + A_GROUP_BYTES)
        x_stride = load_i64(op + A_X_STRIDE)
        scale_stride = load_i64(op + A_SCALE_STRIDE)
        first = private_row(op, step, thread, PRIVATE_INPUT)
        x0 = load_i64(op + A_X) + first * x_stride
        scales0 = load_i64(op + A_SCALES) + first * scale_stride
        offsets0 = load_i64(op + A_OFFSETS) + first * scale_stride
        sums0 = load_i64(op + A_SUMS) + first * scale_stride
        half_sums0 = load_i64(op + A_HALF_SUMS) + first * 2 * scale_stride
        y_stride = load_i64(op + A_Y_STRIDE)
        y0 = load_i64(op + A_Y)
        if load_i64(op + A_LOGITS) != 0:
            y0 = load_i64(step + records.STEP_LOGITS)
        added = load_i64(op + A_ADD)
        chunk = load_i64(op + A_CHUNK)
        start = claim(op) * chunk
        while start < n_groups:
            # Claimed early, so that the end of this chunk asks for the weights of the thread's next one: 43 -> 46 to 56
            # tok/s (1.24B, Q4_0), where it asked for those of another thread.
            next_start = claim(op) * chunk
            end = min(start + chunk, n_groups)
            for group in range(start, end):
                base = load_i64(op + A_WEIGHTS) + group * group_bytes
                to_next = group_bytes
                if group + 1 == end:
                    to_next = (next_start - group) * group_bytes
                mins = base + load_i64(op + A_MINS)
                upper_scales = base + load_i64(op + A_UPPER_SCALES)
                upper_mins = base + load_i64(op + A_UPPER_MINS)
                values = base + load_i64(op + A_VALUES)
                more_values = base + load_i64(op + A_MORE_VALUES)
                row = 0
                while row + wide <= rows:
                    tile = many_zero()
                    x = x0 + row * x_stride
                    at = row * scale_stride
                    for block in range(n_blocks):
                        tile = many_block(
                            *(tile, block, base, mins, upper_scales, upper_mins, values, more_values),
                            *(x, scales0 + at, offsets0 + at, sums0 + at, half_sums0 + 2 * at, x_stride, scale_stride),
                        )
                    many_store(tile, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += wide
                while row < rows:
                    tile1 = one_zero()
                    x = x0 + row * x_stride
                    at = row * scale_stride
                    for block in range(n_blocks):
                        ahead = block + lead
                        shift = 0
                        if ahead >= n_blocks:
                            ahead -= n_blocks
                            shift = to_next
                        prefetch(ahead, base + shift, mins + shift, values + shift, more_values + shift)
                        tile1 = one_block(
                            *(tile1, block, base, mins, upper_scales, upper_mins, values, more_values),
                            *(x, scales0 + at, offsets0 + at, sums0 + at, half_sums0 + 2 * at, x_stride, scale_stride),
                        )
                    one_store(tile1, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += 1
            start = next_start

    return run


@dataclass(frozen=True, slots=True)
class _Activations:
    """Addresses (LLVM i64) of what one row brings to a block of 32 columns."""

    integers: Any
    scale: Any
    offset: Any
    sum: Any
    half_sums: Any


def _tile(level: str, packed: PackedType, rows: int) -> tuple[Any, Any, Any]:
    """(zero, block, store) for a tile of 16 outputs x `rows` rows held in registers."""
    tile = simd.tile_type(rows)
    word = types.int64

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(tile.llvm_type, [simd.constant(simd.F32X16, 0.0)] * rows)

        return tile(), codegen

    @intrinsic
    def block(
        typingctx: Any,
        accumulators: Any,
        number: Any,
        scales: Any,
        mins: Any,
        upper_scales: Any,
        upper_mins: Any,
        values: Any,
        more_values: Any,
        x: Any,
        x_scales: Any,
        x_offsets: Any,
        x_sums: Any,
        x_half_sums: Any,
        x_stride: Any,
        scale_stride: Any,
    ) -> Any:
        """Add one block of 32 columns to every accumulator."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, number, *addresses = args
            planes = unpack.Planes(*addresses[:6])
            x, x_scales, x_offsets, x_sums, x_half_sums, x_stride, scale_stride = addresses[6:]
            weights = unpack.emit_weights(builder, level, packed, planes, number)
            scales = unpack.emit_scales(builder, level, packed, planes, number)
            mins = unpack.emit_mins(builder, level, packed, planes, number)

            def at(address: Any, stride: Any, row: int, n_bytes: int) -> Any:
                of_row = builder.add(address, builder.mul(stride, simd.I64(row)))
                return builder.add(of_row, builder.mul(number, simd.I64(n_bytes)))

            for row in range(rows):
                activations = _Activations(
                    at(x, x_stride, row, 32),
                    at(x_scales, scale_stride, row, 4),
                    at(x_offsets, scale_stride, row, 4),
                    at(x_sums, scale_stride, row, 4),
                    at(x_half_sums, builder.mul(scale_stride, simd.I64(2)), row, 8),
                )
                total = builder.extract_value(accumulators, row)
                total = _emit_row(builder, level, packed, total, weights, scales, mins, activations)
                accumulators = builder.insert_value(accumulators, total, row)
            return accumulators

        return tile(tile, *[word] * 14), codegen

    @intrinsic
    def store(typingctx: Any, accumulators: Any, y: Any, y_stride: Any, added: Any) -> Any:
        """Write the tile; with `added`, onto what is there."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, y, y_stride, added = args
            adds = builder.icmp_signed("!=", added, simd.I64(0))
            for row in range(rows):
                address = builder.add(y, builder.mul(y_stride, simd.I64(row)))
                value = builder.extract_value(accumulators, row)
                simd.emit_store_or_add(builder, address, value, adds)
            return context.get_dummy_value()

        return types.void(tile, word, word, word), codegen

    return zero, block, store


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


def _emit_row(
    builder: Any,
    level: str,
    packed: PackedType,
    total: Any,
    weights: list[Any],
    scales: list[Any],
    mins: list[Any],
    x: _Activations,
) -> Any:
    """total + one block of one row. The order of these floating-point operations is that of `linear_reference`."""
    fours = [
        simd.emit_load(builder, simd.emit_offset(builder, x.integers, 4 * j), simd.I32, 4) for j in range(len(weights))
    ]
    starts = _emit_starts(builder, level, packed, x)
    dots = [builder.sitofp(dot, simd.F32X16) for dot in emit_dots(builder, level, packed, weights, fours, starts)]
    x_scale = simd.emit_load(builder, x.scale, simd.F32, 4)
    spread = simd.emit_splat(builder, x_scale)
    if packed.sub_blocks == 1:
        total = simd.emit_fma(builder, level, dots[0], builder.fmul(scales[0], spread), total)
    else:
        both = simd.emit_fma(builder, level, dots[1], scales[1], builder.fmul(dots[0], scales[0]))
        total = simd.emit_fma(builder, level, both, spread, total)
    for minimum, x_sum in zip(mins, _emit_sums(builder, packed, x, x_scale), strict=False):
        total = simd.emit_fma(builder, level, minimum, simd.emit_splat(builder, x_sum), total)
    return total


def _emit_starts(builder: Any, level: str, packed: PackedType, x: _Activations) -> list[Any]:
    """For each sub-block -bias x the sum of its activations, in all lanes. The quantizer left -8 x the block's sum and
    -1 x the halves'; biases are powers of two."""
    bias = bias_of(level, packed)
    if bias == 0:
        return [simd.constant(simd.I32X16, 0)] * packed.sub_blocks
    if packed.sub_blocks == 1:
        shift, addresses = bias.bit_length() - 1 - 3, [x.offset]
    else:
        shift, addresses = bias.bit_length() - 1, [x.half_sums, simd.emit_offset(builder, x.half_sums, 4)]
    starts = [simd.emit_splat(builder, simd.emit_load(builder, address, simd.I32, 4)) for address in addresses]
    return [builder.shl(start, simd.constant(simd.I32X16, shift)) if shift else start for start in starts]


def _emit_sums(builder: Any, packed: PackedType, x: _Activations, x_scale: Any) -> list[Any]:
    """Scale x sum of the activations, for each sub-block."""
    if packed.sub_blocks == 1:
        return [simd.emit_load(builder, x.sum, simd.F32, 4)]
    halves = [
        simd.emit_load(builder, simd.emit_offset(builder, x.half_sums, 4 * half), simd.I32, 4) for half in range(2)
    ]
    return [builder.fmul(x_scale, builder.sitofp(builder.neg(half), simd.F32)) for half in halves]


def linear_reference(
    integers: NDArray[np.int8],
    scales: NDArray[np.float32],
    mins: NDArray[np.float32] | None,
    x: NDArray[np.int8],
    x_scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The same in NumPy. integers int8[n, blocks, 32] with the zero point taken off, scales and mins
    float32[n, blocks, 1 or 2]: of a block or its halves; x int8[rows, blocks, 32], x_scales float32[rows, blocks].
    Returns float32[rows, n].

    The integers are equal to the kernel's; the sum over blocks is float32 in the same order, so the two differ only by
    the fused multiply-add.
    """
    import numpy as np

    sub_blocks = scales.shape[2]
    halves = (-1, sub_blocks, 32 // sub_blocks)
    weights, activations = (array.reshape(*array.shape[:1], *halves).astype(np.int32) for array in (integers, x))
    x_sums = activations.sum(-1).astype(np.float32) * x_scales[..., None]
    y = np.zeros((len(x), len(integers)), np.float32)
    for block in range(integers.shape[1]):
        dots = np.einsum("nsk,rsk->srn", weights[:, block], activations[:, block]).astype(np.float32)
        if sub_blocks == 1:
            y += dots[0] * (scales[None, :, block, 0] * x_scales[:, block, None])
        else:
            both = dots[0] * scales[None, :, block, 0] + dots[1] * scales[None, :, block, 1]
            y += both * x_scales[:, block, None]
        for sub in range(sub_blocks if mins is not None else 0):
            assert mins is not None
            y += mins[None, :, block, sub] * x_sums[:, block, sub, None]
    return y
