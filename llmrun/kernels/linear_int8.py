"""Matrix times rows, integer weights: y[row, n] = sum over k of weight[n, k] * x[row, k].

Weights are packed (pack.py) in groups of 16 outputs; rows are int8 per block of 32 (quantize.py). The 4 x 16 bytes that
meet in a dot product are exact integers; blocks are added in order of k as floats, so a value depends neither on the
tile nor on the thread that computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_i64
from llmrun.kernels.work import PRIVATE_INPUT, claim, n_rows, private_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
A_WEIGHTS, A_GROUPS, A_BLOCKS, A_GROUP_BYTES, A_MINS, A_QUANTS = (ARG + 8 * i for i in range(6))
A_X, A_X_STRIDE, A_SCALES, A_OFFSETS, A_SUMS, A_SCALE_STRIDE = (ARG + 8 * i for i in range(6, 12))
A_Y, A_Y_STRIDE, A_ADD, A_CHUNK, A_LOGITS = (ARG + 8 * i for i in range(12, 17))

# Bytes of integers in a group's block: 16 rows x 32 columns.
QUANT_BYTES = {"q4_0": 256, "q4_1": 256, "q8_0": 512}

# A tile of 16 outputs x 8 rows keeps 8 accumulators, 8 unpacked weight vectors and 8 partial sums in 32 registers.
# 4 rows did as well, 12 and more spilled. Where vectors are 32 bytes and registers 16, smaller tiles do better.
WIDE_TILE = 8


@kernel_family
def linear(level: str, weight: str) -> Callable[..., None]:
    """`weight`: "q4_0", "q4_1" or "q8_0"."""
    quant_bytes = QUANT_BYTES[weight]
    wide = WIDE_TILE if level == "avx512vnni" else 2
    many_zero, many_block, many_store = _tile(level, weight, wide)
    one_zero, one_block, one_store = _tile(level, weight, 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        n_groups = load_i64(op + A_GROUPS)
        n_blocks = load_i64(op + A_BLOCKS)
        group_bytes = load_i64(op + A_GROUP_BYTES)
        mins = load_i64(op + A_MINS)
        quants = load_i64(op + A_QUANTS)
        x_stride = load_i64(op + A_X_STRIDE)
        scale_stride = load_i64(op + A_SCALE_STRIDE)
        first = private_row(op, step, thread, PRIVATE_INPUT)
        x0 = load_i64(op + A_X) + first * x_stride
        scales0 = load_i64(op + A_SCALES) + first * scale_stride
        offsets0 = load_i64(op + A_OFFSETS) + first * scale_stride
        sums0 = load_i64(op + A_SUMS) + first * scale_stride
        y_stride = load_i64(op + A_Y_STRIDE)
        y0 = load_i64(op + A_Y)
        if load_i64(op + A_LOGITS) != 0:
            y0 = load_i64(step + records.STEP_LOGITS)
        added = load_i64(op + A_ADD)
        chunk = load_i64(op + A_CHUNK)
        start = claim(op) * chunk
        while start < n_groups:
            for group in range(start, min(start + chunk, n_groups)):
                base = load_i64(op + A_WEIGHTS) + group * group_bytes
                row = 0
                while row + wide <= rows:
                    tile = many_zero()
                    x = x0 + row * x_stride
                    at = row * scale_stride
                    for block in range(n_blocks):
                        tile = many_block(
                            tile,
                            base + 32 * block,
                            base + mins + 32 * block,
                            base + quants + quant_bytes * block,
                            x + 32 * block,
                            x_stride,
                            scales0 + at + 4 * block,
                            offsets0 + at + 4 * block,
                            sums0 + at + 4 * block,
                            scale_stride,
                        )
                    many_store(tile, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += wide
                while row < rows:
                    tile1 = one_zero()
                    x = x0 + row * x_stride
                    at = row * scale_stride
                    for block in range(n_blocks):
                        tile1 = one_block(
                            tile1,
                            base + 32 * block,
                            base + mins + 32 * block,
                            base + quants + quant_bytes * block,
                            x + 32 * block,
                            x_stride,
                            scales0 + at + 4 * block,
                            offsets0 + at + 4 * block,
                            sums0 + at + 4 * block,
                            scale_stride,
                        )
                    one_store(tile1, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += 1
            start = claim(op) * chunk

    return run


def _tile(level: str, weight: str, rows: int) -> tuple[Any, Any, Any]:
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
        scales: Any,
        mins: Any,
        quants: Any,
        x: Any,
        x_stride: Any,
        x_scales: Any,
        x_offsets: Any,
        x_sums: Any,
        scale_stride: Any,
    ) -> Any:
        """Add one block of 32 columns to every accumulator."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, scales, mins, quants, x, x_stride, x_scales, x_offsets, x_sums, scale_stride = args
            vectors = _emit_unpacked(builder, weight, quants)
            scale = simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, scales, simd.F16X16, 2))
            if weight == "q4_1":
                minimum = simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, mins, simd.F16X16, 2))
            for row in range(rows):
                shift = builder.mul(scale_stride, simd.I64(row))
                x_row = builder.add(x, builder.mul(x_stride, simd.I64(row)))
                sums = _emit_dots(builder, level, weight, vectors, x_row, builder.add(x_offsets, shift))
                x_scale = simd.emit_load(builder, builder.add(x_scales, shift), simd.F32, 4)
                product = builder.fmul(scale, simd.emit_splat(builder, x_scale))
                total = builder.extract_value(accumulators, row)
                total = simd.emit_fma(builder, level, builder.sitofp(sums, simd.F32X16), product, total)
                if weight == "q4_1":
                    x_sum = simd.emit_load(builder, builder.add(x_sums, shift), simd.F32, 4)
                    total = simd.emit_fma(builder, level, minimum, simd.emit_splat(builder, x_sum), total)
                accumulators = builder.insert_value(accumulators, total, row)
            return accumulators

        return tile(tile, *[word] * 9), codegen

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


def _emit_unpacked(builder: Any, weight: str, quants: Any) -> list[Any]:
    """8 vectors <64 x i8> of unsigned weights; vector j holds columns 4j..4j+3 of 16 rows."""
    if weight == "q8_0":
        loaded = [simd.emit_load(builder, simd.emit_offset(builder, quants, 64 * j), simd.I8X64, 64) for j in range(8)]
        return [builder.xor(vector, simd.constant(simd.I8X64, -128)) for vector in loaded]
    loaded = [simd.emit_load(builder, simd.emit_offset(builder, quants, 64 * j), simd.I8X64, 64) for j in range(4)]
    low = [builder.and_(vector, simd.constant(simd.I8X64, 15)) for vector in loaded]
    return low + [builder.lshr(vector, simd.constant(simd.I8X64, 4)) for vector in loaded]


def _emit_dots(builder: Any, level: str, weight: str, vectors: list[Any], x: Any, offset: Any) -> Any:
    """16 integer dot products of 32 columns, the weights' zero point taken off.

    `offset` is the address of -8 x the sum of the block's activations: what Q4_0's zero point of 8 amounts to.
    Q8_0's is 128, 16 times as much. Two chains halve the latency; integers do not mind the order.
    """
    first = simd.constant(simd.I32X16, 0)
    if weight != "q4_1":
        first = simd.emit_splat(builder, simd.emit_load(builder, offset, simd.I32, 4))
        if weight == "q8_0":
            first = builder.shl(first, simd.constant(simd.I32X16, 4))
    chains = [first, simd.constant(simd.I32X16, 0)]
    for j, vector in enumerate(vectors):
        four = simd.emit_load(builder, simd.emit_offset(builder, x, 4 * j), simd.I32, 4)
        activations = builder.bitcast(simd.emit_splat(builder, four), simd.I8X64)
        chains[j & 1] = simd.emit_dot(builder, level, chains[j & 1], vector, activations)
    return builder.add(chains[0], chains[1])


def linear_reference(
    integers: NDArray[np.int8],
    scales: NDArray[np.float32],
    mins: NDArray[np.float32] | None,
    x: NDArray[np.int8],
    x_scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The same in NumPy. integers int8[n, blocks, 32] with the zero point taken off, scales and mins
    float32[n, blocks]; x int8[rows, blocks, 32], x_scales float32[rows, blocks]. Returns float32[rows, n].

    The integers are equal to the kernel's; the sum over blocks is float32 in the same order, so the two differ only by
    the fused multiply-add.
    """
    import numpy as np

    dots = np.einsum("nbk,rbk->rnb", integers.astype(np.int32), x.astype(np.int32))
    terms = dots.astype(np.float32) * (scales[None] * x_scales[:, None])
    x_sums = x.astype(np.int32).sum(-1).astype(np.float32) * x_scales
    y = np.zeros(terms.shape[:2], np.float32)
    for block in range(terms.shape[2]):
        y += terms[:, :, block]
        if mins is not None:
            y += mins[None, :, block] * x_sums[:, None, block]
    return y
