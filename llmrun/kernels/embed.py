"""Rows of the token embedding, read straight from the model file: a token touches one row, so nothing is unpacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import kernel, kernel_family
from llmrun.kernels.memory import load_i32, load_i64
from llmrun.kernels.work import first_item, n_rows, next_item

ARG = records.OP_ARGS
A_TABLE, A_ROW_BYTES, A_WIDTH, A_Y, A_Y_STRIDE = (ARG + 8 * i for i in range(5))

# (values, bytes) of what one call of the loader turns into floats.
STRIDES = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20)}


@kernel_family
def embed(level: str, weight: str) -> Callable[..., None]:
    values, size = STRIDES[weight]
    unpack = _unpack_one(level, weight) if values == 1 else _unpack_block(level, weight)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        row = first_item(op, step)
        while row < rows:
            token = load_i32(load_i64(step + records.STEP_TOKENS) + 4 * row)
            source = load_i64(op + A_TABLE) + token * load_i64(op + A_ROW_BYTES)
            y = load_i64(op + A_Y) + row * load_i64(op + A_Y_STRIDE)
            for index in range(load_i64(op + A_WIDTH) // values):
                unpack(y + 4 * values * index, source + size * index)
            row = next_item(op, step, row)

    return run


def _unpack_one(level: str, weight: str) -> Any:
    @intrinsic
    def unpack(typingctx: Any, y: Any, source: Any) -> Any:
        """One float, through the vector conversion of the level."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, source = args
            if weight == "f32":
                value = simd.emit_load(builder, source, simd.F32, 4)
            elif weight == "f16":
                half = simd.emit_splat(builder, simd.emit_load(builder, source, simd.F16, 2))
                value = builder.extract_element(simd.emit_f16_to_f32(builder, level, half), simd.I32(0))
            else:
                bits = builder.zext(simd.emit_load(builder, source, simd.I16, 2), simd.I32)
                value = builder.bitcast(builder.shl(bits, simd.I32(16)), simd.F32)
            simd.emit_store(builder, y, value, 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return unpack


def _unpack_block(level: str, weight: str) -> Any:
    @intrinsic
    def unpack(typingctx: Any, y: Any, source: Any) -> Any:
        """A block of 32 floats: integer x scale, + min for Q4_1; two roundings, as the reference has it."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, source = args

            def half_at(offset: int) -> Any:
                half = simd.emit_load(builder, simd.emit_offset(builder, source, offset), simd.F16, 1)
                return simd.emit_f16_to_f32(builder, level, simd.emit_splat(builder, half))

            scale = half_at(0)
            bytes16 = ir.VectorType(simd.I8, 16)
            for part in range(2):
                if weight == "q8_0":
                    raw = simd.emit_load(builder, simd.emit_offset(builder, source, 2 + 16 * part), bytes16)
                    integers = builder.sext(raw, simd.I32X16)
                else:
                    header = 4 if weight == "q4_1" else 2
                    raw = simd.emit_load(builder, simd.emit_offset(builder, source, header), bytes16)
                    fifteen, four = simd.constant(bytes16, 15), simd.constant(bytes16, 4)
                    nibbles = builder.and_(raw, fifteen) if part == 0 else builder.lshr(raw, four)
                    integers = builder.zext(nibbles, simd.I32X16)
                    if weight == "q4_0":
                        integers = builder.sub(integers, simd.constant(simd.I32X16, 8))
                value = builder.fmul(builder.sitofp(integers, simd.F32X16), scale)
                if weight == "q4_1":
                    value = builder.fadd(value, half_at(2))
                simd.emit_store(builder, simd.emit_offset(builder, y, 64 * part), value, 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return unpack
