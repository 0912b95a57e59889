"""Matrix products with float matrices (F32, F16, BF16). Activations stay float32.

Each output has four partial sums: one over columns 0, 4, 8 ..., one over columns 1, 5, 9 ..., and so on. They are
added as (0 + 1) + (2 + 3). Four sums are enough to hide the latency of a fused multiply-add, and the order is the same
in every tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import FLOAT_BYTES
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, claim, n_rows, private_row
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.model.plan.ops.linear import PARTIALS, FloatWords

PRODUCT = records.offsets(FloatWords)

WIDE_TILE = 4  # 4 rows x 4 partial sums use 16 registers; 8 rows would use all 32


@kernel_family
def linear(level: str, weight: str) -> Callable[..., None]:
    """Build the kernel for a weight type: "f32", "f16" or "bf16".

    Columns are padded with zero weights to a multiple of 4.
    """
    element = FLOAT_BYTES[weight]
    wide = WIDE_TILE if level == "avx512vnni" else 1
    many_zero, many_columns, many_store = float_tile(level, weight, wide)
    one_zero, one_columns, one_store = float_tile(level, weight, 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        n_groups = load_i64(op + PRODUCT.groups)
        columns = load_i64(op + PRODUCT.columns)
        group_bytes = load_i64(op + PRODUCT.group_bytes)
        x_stride = load_i64(op + PRODUCT.x_stride)
        x0 = load_i64(op + PRODUCT.x) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
        y_stride = load_i64(op + PRODUCT.out_stride)
        y0 = load_i64(op + PRODUCT.out)
        if load_i64(op + PRODUCT.logits) != 0:
            y0 = load_i64(step + records.STEP_LOGITS)
        added = load_i64(op + PRODUCT.adds)
        chunk = load_i64(op + PRODUCT.chunk)
        start = claim(op) * chunk
        while start < n_groups:
            for group in range(start, min(start + chunk, n_groups)):
                base = load_i64(op + PRODUCT.weights) + group * group_bytes
                row = 0
                while row + wide <= rows:
                    tile = many_zero()
                    for column in range(0, columns, 4):
                        tile = many_columns(
                            tile, base + 16 * element * column, x0 + row * x_stride + 4 * column, x_stride
                        )
                    many_store(tile, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += wide
                while row < rows:
                    tile1 = one_zero()
                    for column in range(0, columns, 4):
                        tile1 = one_columns(
                            tile1, base + 16 * element * column, x0 + row * x_stride + 4 * column, x_stride
                        )
                    one_store(tile1, y0 + row * y_stride + 64 * group, y_stride, added)
                    row += 1
            start = claim(op) * chunk

    return run


def _emit_weights(builder: Any, level: str, weight: str, address: Any) -> Any:
    if weight == "f32":
        return simd.emit_load(builder, address, simd.F32X16, 4)
    if weight == "f16":
        return simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, address, simd.F16X16, 2))
    return simd.emit_bf16_to_f32(builder, simd.emit_load(builder, address, simd.I16X16, 2))


def float_tile(level: str, weight: str, rows: int) -> tuple[Any, Any, Any]:
    """Return (zero, columns, store) for a tile of 16 outputs x `rows` rows, with four partial sums each."""
    tile = simd.tile_type(rows * PARTIALS)
    word = types.int64
    element = FLOAT_BYTES[weight]

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(tile.llvm_type, [simd.constant(simd.F32X16, 0.0)] * (rows * PARTIALS))

        return tile(), codegen

    @intrinsic
    def columns(typingctx: Any, accumulators: Any, weights: Any, x: Any, x_stride: Any) -> Any:
        """Add the products of four columns, one to each partial sum."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, weights, x, x_stride = args
            for partial in range(PARTIALS):
                address = simd.emit_offset(builder, weights, 16 * element * partial)
                vector = _emit_weights(builder, level, weight, address)
                for row in range(rows):
                    at = builder.add(x, builder.mul(x_stride, simd.I64(row)))
                    value = simd.emit_load(builder, simd.emit_offset(builder, at, 4 * partial), simd.F32, 4)
                    index = row * PARTIALS + partial
                    total = builder.extract_value(accumulators, index)
                    total = simd.emit_fma(builder, level, vector, simd.emit_splat(builder, value), total)
                    accumulators = builder.insert_value(accumulators, total, index)
            return accumulators

        return tile(tile, word, word, word), codegen

    @intrinsic
    def store(typingctx: Any, accumulators: Any, y: Any, y_stride: Any, added: Any) -> Any:
        """Sum the partial sums and store the results, or add them to the output if `added` is set."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, y, y_stride, added = args
            adds = builder.icmp_signed("!=", added, simd.I64(0))
            for row in range(rows):
                address = builder.add(y, builder.mul(y_stride, simd.I64(row)))
                parts = [builder.extract_value(accumulators, row * PARTIALS + i) for i in range(PARTIALS)]
                value = builder.fadd(builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3]))
                simd.emit_store_or_add(builder, address, value, adds)
            return context.get_dummy_value()

        return types.void(tile, word, word, word), codegen

    return zero, columns, store
