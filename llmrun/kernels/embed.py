"""Rows of the token embedding, looked up in the packed matrix (pack.py has the layout).

A model whose output is tied to its embedding has that matrix in memory once, and a row gathered from a group of 16 is
still only a few thousand loads a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels import records, simd
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.kernels.memory import load_i32, load_i64
from llmrun.kernels.work import first_item, n_rows, next_item

ARG = records.OP_ARGS
A_TABLE, A_GROUP_BYTES, A_MINS, A_INTEGERS, A_WIDTH, A_Y, A_Y_STRIDE = (ARG + 8 * i for i in range(7))

_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@kernel_family
def embed(level: str, weight: str) -> Callable[..., None]:
    unpack_row = _float_row(level, weight) if weight in _FLOAT_BYTES else _integer_row(level, weight)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        row = first_item(op, step)
        while row < rows:
            token = load_i32(load_i64(step + records.STEP_TOKENS) + 4 * row)
            group = load_i64(op + A_TABLE) + token // 16 * load_i64(op + A_GROUP_BYTES)
            y = load_i64(op + A_Y) + row * load_i64(op + A_Y_STRIDE)
            unpack_row(op, group, token % 16, y)
            row = next_item(op, step, row)

    return run


def _float_row(level: str, weight: str) -> Any:
    size = _FLOAT_BYTES[weight]
    unpack = _unpack_one(level, weight)

    @inline_function
    def unpack_row(op: Any, group: Any, lane: Any, y: Any) -> None:
        for column in range(load_i64(op + A_WIDTH)):
            unpack(y + 4 * column, group + (16 * column + lane) * size)

    return unpack_row


def _integer_row(level: str, weight: str) -> Any:
    block_bytes = 512 if weight == "q8_0" else 256
    unpack = _unpack_block(level, weight)

    @inline_function
    def unpack_row(op: Any, group: Any, lane: Any, y: Any) -> None:
        scales = group + 2 * lane
        mins = scales + load_i64(op + A_MINS)
        integers = group + load_i64(op + A_INTEGERS) + 4 * lane
        for block in range(load_i64(op + A_WIDTH) // 32):
            unpack(y + 128 * block, integers + block_bytes * block, scales + 32 * block, mins + 32 * block)

    return unpack_row


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
    words_type = ir.VectorType(simd.I32, 4)
    bytes_type = ir.VectorType(simd.I8, 16)

    def emit_gather(builder: Any, integers: Any, first_word: int) -> Any:
        """Four words of a lane, 64 bytes apart, as 16 bytes."""
        words = ir.Constant(words_type, ir.Undefined)
        for index in range(4):
            word = simd.emit_load(builder, simd.emit_offset(builder, integers, 64 * (first_word + index)), simd.I32, 4)
            words = builder.insert_element(words, word, simd.I32(index))
        return builder.bitcast(words, bytes_type)

    @intrinsic
    def unpack(typingctx: Any, y: Any, integers: Any, scale: Any, minimum: Any) -> Any:
        """A block of 32 floats: integer x scale, + min for Q4_1; two roundings, as the reference has it."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, source, scale_at, minimum_at = args

            def half_at(address: Any) -> Any:
                half = simd.emit_load(builder, address, simd.F16, 2)
                return simd.emit_f16_to_f32(builder, level, simd.emit_splat(builder, half))

            scale = half_at(scale_at)
            for part in range(2):
                if weight == "q8_0":
                    integers = builder.sext(emit_gather(builder, source, 4 * part), simd.I32X16)
                else:
                    raw = emit_gather(builder, source, 0)
                    fifteen, four = simd.constant(bytes_type, 15), simd.constant(bytes_type, 4)
                    nibbles = builder.and_(raw, fifteen) if part == 0 else builder.lshr(raw, four)
                    integers = builder.zext(nibbles, simd.I32X16)
                    if weight == "q4_0":
                        integers = builder.sub(integers, simd.constant(simd.I32X16, 8))
                value = builder.fmul(builder.sitofp(integers, simd.F32X16), scale)
                if weight == "q4_1":
                    value = builder.fadd(value, half_at(minimum_at))
                simd.emit_store(builder, simd.emit_offset(builder, y, 64 * part), value, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return unpack
