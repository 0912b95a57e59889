"""Looks up token embeddings in the packed matrix (quants/weight_type.py describes the layout).

Because lookups use the packed matrix, models with tied embeddings keep only one copy of it in memory. Gathering
a row from a group of 16 takes only a few thousand loads per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.linear import FLOAT_BYTES, PACKED_TYPES
from llmrun.formats.layouts.records import offsets
from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import dots, simd, unpack
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64
from llmrun.kernels.code.work import PRIVATE_OUTPUT, first_item, n_rows, next_item, private_row
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.model.plan.ops.embedding import EmbedWords

_EMBED = offsets(EmbedWords)

_I32X4, _I8X16 = ir.VectorType(simd.I32, 4), ir.VectorType(simd.I8, 16)


@kernel_family
def embed(level: str, weight: str) -> Callable[..., None]:
    unpack_row = _float_row(level, weight) if weight in FLOAT_BYTES else _integer_row(level, weight)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            token = load_i32(load_i64(step + load_i64(op + _EMBED.indices)) + 4 * row)
            group = load_i64(op + _EMBED.table) + token // 16 * load_i64(op + _EMBED.group_bytes)
            y = load_i64(op + _EMBED.out)
            y += (row + private_row(op, step, thread, PRIVATE_OUTPUT)) * load_i64(op + _EMBED.out_stride)
            unpack_row(op, group, token % 16, y)
            scale = load_f32(op + _EMBED.scale)
            if scale != types.float32(1):
                for at in range(0, 4 * load_i64(op + _EMBED.width), 64):
                    simd.store_f32x16(y + at, simd.multiply(simd.load_f32x16(y + at), simd.splat(scale)))
            row = next_item(op, step, row, n_threads, rows)

    return run


def _float_row(level: str, weight: str) -> Any:
    size = FLOAT_BYTES[weight]
    unpack_one = _unpack_one(level, weight)

    @inline_function
    def unpack_row(op: Any, group: Any, lane: Any, y: Any) -> None:
        for column in range(load_i64(op + _EMBED.width)):
            unpack_one(y + 4 * column, group + (16 * column + lane) * size)

    return unpack_row


def _integer_row(level: str, weight: str) -> Any:
    unpack_block, segment_blocks = _unpack_block(level, PACKED_TYPES[weight]), PACKED_TYPES[weight].segment_blocks

    @inline_function
    def unpack_row(op: Any, group: Any, lane: Any, y: Any) -> None:
        n_blocks = load_i64(op + _EMBED.width) // 32
        for first in range(0, n_blocks, segment_blocks):
            for block in range(first, min(first + segment_blocks, n_blocks)):
                unpack_block(y + 128 * block, lane, group, first, block)

    return unpack_row


def _unpack_one(level: str, weight: str) -> Any:
    @intrinsic
    def convert(typingctx: Any, y: Any, source: Any) -> Any:
        """Convert one float with the vector conversion of this instruction-set level."""

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

    return convert


def _unpack_block(level: str, packed: PackedType) -> Any:
    @intrinsic
    def convert(typingctx: Any, y: Any, lane: Any, group: Any, first: Any, block: Any) -> Any:
        """Unpack 32 floats of one lane as integer x scale + minimum, rounded twice like the reference.

        It unpacks all 16 rows of the group and uses only one. The cost is acceptable, because looking up a row is a
        small part of the work per token.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, lane, group, first, block = args
            place = unpack.Place(builder, group, first, block)
            lane32 = builder.trunc(lane, simd.I32)
            scales = unpack.emit_scales(level, packed, place)
            mins = unpack.emit_mins(level, packed, place)
            words = [
                builder.extract_element(builder.bitcast(vector, simd.I32X16), lane32)
                for vector in unpack.emit_weights(level, packed, place)
            ]
            bias = simd.constant(simd.I32X16, dots.bias_of(level, packed))
            unsigned = dots.takes_unsigned(level, packed)
            for half in range(2):
                four = ir.Constant(_I32X4, ir.Undefined)
                for index, word in enumerate(words[4 * half : 4 * half + 4]):
                    four = builder.insert_element(four, word, simd.I32(index))
                integers = builder.bitcast(four, _I8X16)
                wide = (builder.zext if unsigned else builder.sext)(integers, simd.I32X16)
                floats = builder.sitofp(builder.sub(wide, bias), simd.F32X16)
                sub = half if packed.sub_blocks == 2 else 0
                scale = simd.emit_splat(builder, builder.extract_element(scales[sub], lane32))
                value = builder.fmul(floats, scale)
                if mins:
                    minimum = simd.emit_splat(builder, builder.extract_element(mins[sub], lane32))
                    value = builder.fadd(value, minimum)
                simd.emit_store(builder, simd.emit_offset(builder, y, 64 * half), value, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return convert
