"""Tiles for matrix products of a few rows, with weights read from a packed group."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import simd, unpack
from llmrun.kernels.linear.activations import Activations
from llmrun.kernels.linear.tiles import PackedBlock, emit_block, zero_tile

_WORD = types.int64


def consecutive_rows(size: int) -> Any:
    """Return an intrinsic for the indices of a tile's rows, which follow one another, starting at `first`."""

    @intrinsic
    def indices(typingctx: Any, first: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first, count = args
            return _emit_array(builder, [builder.add(first, index) for index in _emit_rows(builder, count, size)])

        return _indices(size)(_WORD, _WORD), codegen

    return indices


def numbered_rows(size: int) -> Any:
    """Return an intrinsic for the indices of a tile's rows, which are in the int32[count] at `numbers`."""

    @intrinsic
    def indices(typingctx: Any, numbers: Any, count: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers, count = args
            at = [builder.mul(index, simd.I64(4)) for index in _emit_rows(builder, count, size)]
            loaded = [simd.emit_load(builder, builder.add(numbers, offset), simd.I32, 4) for offset in at]
            return _emit_array(builder, [builder.zext(index, simd.I64) for index in loaded])

        return _indices(size)(_WORD, _WORD), codegen

    return indices


def few_rows(level: str, packed: PackedType, rows: int) -> tuple[Any, Any, Any]:
    """Return (zero, block, store) for 16 outputs of at most `rows` rows, with weights read from a packed group.

    Each block is unpacked once for all rows. A tile with fewer rows repeats its last row, and gets the same result each
    time.
    """
    held = simd.tile_type(rows)

    @intrinsic
    def block(
        typingctx: Any,
        accumulators: Any,
        group: Any,
        first: Any,
        number: Any,
        x: Any,
        x_stride: Any,
        indices: Any,
    ) -> Any:
        """Add one block of 32 columns. `x` is the address of row 0."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, group, first, number, x, x_stride, indices = args
            weights = PackedBlock(level, packed, unpack.Place(builder, group, first, number))
            offsets = [builder.mul(x_stride, builder.extract_value(indices, row)) for row in range(rows)]
            activations = [Activations(builder, builder.add(x, offset), number) for offset in offsets]
            return emit_block(builder, level, packed, accumulators, [weights], activations)

        return held(held, *[_WORD] * 5, _indices(rows)), codegen

    @intrinsic
    def store(typingctx: Any, accumulators: Any, y: Any, y_stride: Any, count: Any, added: Any) -> Any:
        """Store `count` rows, or add them to the values in memory if `added` is set."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, y, y_stride, count, added = args
            values = [builder.extract_value(accumulators, row) for row in range(rows)]
            addresses = [builder.add(y, builder.mul(y_stride, index)) for index in _emit_rows(builder, count, rows)]
            with builder.if_else(builder.icmp_signed("!=", added, simd.I64(0))) as (then, otherwise):
                with then:
                    # All values are loaded before any is stored, so that a repeated row is added only once.
                    before = [simd.emit_load(builder, address, simd.F32X16, 4) for address in addresses]
                    for address, old, value in zip(addresses, before, values, strict=True):
                        simd.emit_store(builder, address, builder.fadd(old, value), 4)
                with otherwise:
                    for address, value in zip(addresses, values, strict=True):
                        simd.emit_store(builder, address, value, 4)
            return context.get_dummy_value()

        return types.void(held, *[_WORD] * 4), codegen

    return zero_tile(held), block, store


def _indices(size: int) -> simd.VectorType:
    return simd.VectorType(f"i64x{size}", ir.ArrayType(simd.I64, size))


def _emit_rows(builder: Any, count: Any, size: int) -> list[Any]:
    """Emit 0, 1, 2 and so on up to `count` - 1, which is repeated until there are `size` numbers."""
    last = builder.sub(count, simd.I64(1))
    numbers = [simd.I64(row) for row in range(size)]
    return [builder.select(builder.icmp_signed("<", last, number), last, number) for number in numbers]


def _emit_array(builder: Any, values: list[Any]) -> Any:
    array = ir.Constant(ir.ArrayType(simd.I64, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        array = builder.insert_value(array, value, index)
    return array
