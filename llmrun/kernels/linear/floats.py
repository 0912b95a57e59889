"""Matrix times rows, float weights (F32, F16, BF16): activations stay float32.

Four partial sums a value, over columns 0, 4, 8 ..., 1, 5, 9 ... and so on, added as (0 + 1) + (2 + 3): enough to hide
the latency of a fused multiply-add, and the same order for every tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, claim, n_rows, private_row
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.layouts import records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARG = records.OP_ARGS
A_WEIGHTS, A_GROUPS, A_COLUMNS, A_GROUP_BYTES, A_X, A_X_STRIDE = (ARG + 8 * i for i in range(6))
A_Y, A_Y_STRIDE, A_ADD, A_CHUNK, A_LOGITS = (ARG + 8 * i for i in range(6, 11))

PARTIALS = 4
WIDE_TILE = 4  # 4 rows x 4 partial sums are 16 accumulators; 8 rows would be all 32 registers

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@kernel_family
def linear(level: str, weight: str) -> Callable[..., None]:
    """`weight`: "f32", "f16" or "bf16". Columns are padded to a multiple of 4, with zero weights."""
    element = ELEMENT_BYTES[weight]
    wide = WIDE_TILE if level == "avx512vnni" else 1
    many_zero, many_columns, many_store = float_tile(level, weight, wide)
    one_zero, one_columns, one_store = float_tile(level, weight, 1)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        n_groups = load_i64(op + A_GROUPS)
        columns = load_i64(op + A_COLUMNS)
        group_bytes = load_i64(op + A_GROUP_BYTES)
        x_stride = load_i64(op + A_X_STRIDE)
        x0 = load_i64(op + A_X) + private_row(op, step, thread, PRIVATE_INPUT) * x_stride
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
    """(zero, columns, store) for a tile of 16 outputs x `rows` rows with four partial sums each."""
    tile = simd.tile_type(rows * PARTIALS)
    word = types.int64
    element = ELEMENT_BYTES[weight]

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(tile.llvm_type, [simd.constant(simd.F32X16, 0.0)] * (rows * PARTIALS))

        return tile(), codegen

    @intrinsic
    def columns(typingctx: Any, accumulators: Any, weights: Any, x: Any, x_stride: Any) -> Any:
        """Add four columns, one to each partial sum."""

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
        """Fold the partial sums and write the tile; with `added`, onto what is there."""

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


def linear_reference(weights: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same in NumPy: weights float32[n, k], x float32[rows, k]; returns float32[rows, n], partial sums in order."""
    import numpy as np

    partial = np.zeros((PARTIALS, len(x), len(weights)), np.float32)
    for column in range(x.shape[1]):
        partial[column % PARTIALS] += weights[None, :, column] * x[:, None, column]
    result: NDArray[np.float32] = (partial[0] + partial[1]) + (partial[2] + partial[3])
    return result
