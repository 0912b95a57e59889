"""Operations on a part of a head's matrix: all keys and 16 * `vectors` columns of the values.

A part is stored as float32[key size, 16 * vectors]. The order of operations for a column does not depend on the number
of vectors: its products with the keys are always added one after another.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd

_WORD = types.int64


class MatrixPart:
    """The operations, as functions that kernels call. `columns` is the type of a row of the part."""

    def __init__(self, level: str, vectors: int) -> None:
        self.columns = simd.tile_type(vectors)
        self.zeros = _zeros(self.columns, vectors)
        self.load = _load(self.columns, vectors)
        self.store = _store(self.columns, vectors)
        self.scaled = _scaled(self.columns, vectors)
        self.scaled_sum = _scaled_sum(level, self.columns, vectors)
        self.add_product = _add_product(level, self.columns, vectors)
        self.update = _update(level, self.columns, vectors)


def _address(builder: Any, address: Any, index: int) -> Any:
    return simd.emit_offset(builder, address, 64 * index)


def _zeros(columns: Any, vectors: int) -> Any:
    @intrinsic
    def zeros(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(columns.llvm_type, [simd.constant(simd.F32X16, 0.0)] * vectors)

        return columns(), codegen

    return zeros


def _load(columns: Any, vectors: int) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = ir.Constant(columns.llvm_type, ir.Undefined)
            for index in range(vectors):
                vector = simd.emit_load(builder, _address(builder, args[0], index), simd.F32X16, 4)
                loaded = builder.insert_value(loaded, vector, index)
            return loaded

        return columns(_WORD), codegen

    return load


def _store(columns: Any, vectors: int) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, values: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for index in range(vectors):
                simd.emit_store(builder, _address(builder, args[0], index), builder.extract_value(args[1], index), 4)
            return context.get_dummy_value()

        return types.void(_WORD, columns), codegen

    return store


def _scaled(columns: Any, vectors: int) -> Any:
    @intrinsic
    def scaled(typingctx: Any, factor: Any, values: Any) -> Any:
        """Return factor * values."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factor, values = args
            for index in range(vectors):
                product = builder.fmul(factor, builder.extract_value(values, index))
                values = builder.insert_value(values, product, index)
            return values

        return columns(simd.f32x16, columns), codegen

    return scaled


def _scaled_sum(level: str, columns: Any, vectors: int) -> Any:
    @intrinsic
    def scaled_sum(typingctx: Any, factor: Any, values: Any, others: Any) -> Any:
        """Return factor * values + others."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factor, values, others = args
            for index in range(vectors):
                value, other = (builder.extract_value(each, index) for each in (values, others))
                total = simd.emit_fma(builder, level, factor, value, other)
                others = builder.insert_value(others, total, index)
            return others

        return columns(simd.f32x16, columns, columns), codegen

    return scaled_sum


def _add_product(level: str, columns: Any, vectors: int) -> Any:
    @intrinsic
    def add_product(typingctx: Any, sums: Any, factor: Any, row: Any) -> Any:
        """Return sums + factor * row, where `factor` is the address of a float and `row` that of a row of the part."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, factor, row = args
            factor = simd.emit_splat(builder, simd.emit_load(builder, factor, simd.F32, 4))
            for index in range(vectors):
                vector = simd.emit_load(builder, _address(builder, row, index), simd.F32X16, 4)
                total = simd.emit_fma(builder, level, factor, vector, builder.extract_value(sums, index))
                sums = builder.insert_value(sums, total, index)
            return sums

        return columns(columns, _WORD, _WORD), codegen

    return add_product


def _update(level: str, columns: Any, vectors: int) -> Any:
    @intrinsic
    def update(typingctx: Any, row: Any, decay: Any, key: Any, change: Any) -> Any:
        """Compute row = decay * row + key * change in memory, where `key` is the address of a float."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row, decay, key, change = args
            key = simd.emit_splat(builder, simd.emit_load(builder, key, simd.F32, 4))
            for index in range(vectors):
                address = _address(builder, row, index)
                decayed = builder.fmul(decay, simd.emit_load(builder, address, simd.F32X16, 4))
                total = simd.emit_fma(builder, level, key, builder.extract_value(change, index), decayed)
                simd.emit_store(builder, address, total, 4)
            return context.get_dummy_value()

        return types.void(_WORD, simd.f32x16, _WORD, columns), codegen

    return update
