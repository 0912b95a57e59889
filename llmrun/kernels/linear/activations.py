"""Access to quantized activations inside an @intrinsic, for matrix products. quantize.py writes the activations."""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts import linear
from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import simd
from llmrun.kernels.code.dots import bias_of


class Activations:
    """Emits loads from one block of a quantized row (layouts/linear.py)."""

    def __init__(self, builder: Any, row: Any, block: Any) -> None:
        """`row` is the row's address and `block` the index of the block, both LLVM i64 values."""
        self._builder = builder
        self._address = builder.add(row, builder.mul(block, simd.I64(linear.BLOCK_BYTES)))

    def columns(self, index: int) -> Any:
        """Emit a load of columns 4 * index to 4 * index + 3 as an i32."""
        return self._load(linear.INTEGERS + 4 * index, simd.I32)

    def sixteen(self, index: int) -> Any:
        """Emit a load of columns 16 * index to 16 * index + 15 as a <16 x i8>."""
        return self._load(linear.INTEGERS + 16 * index, simd.I8X16)

    def scale(self) -> Any:
        """Emit a load of the block's scale as a float."""
        return self._load(linear.SCALE, simd.F32)

    def starts(self, level: str, packed: PackedType) -> list[Any]:
        """Emit -bias x the sum of the integers for each sub-block, in all lanes.

        The block contains -8 x the sum of the block and -1 x the sum of its first half. Biases are powers of two, so a
        shift is sufficient.
        """
        builder, bias = self._builder, bias_of(level, packed)
        if bias == 0:
            return [simd.constant(simd.I32X16, 0)] * packed.sub_blocks
        if packed.sub_blocks == 1:
            shift, sums = bias.bit_length() - 1 - 3, [self._load(linear.OFFSET, simd.I32)]
        else:
            shift, sums = bias.bit_length() - 1, [self._half_sum(half) for half in range(2)]
        starts = [simd.emit_splat(builder, total) for total in sums]
        return [builder.shl(start, simd.constant(simd.I32X16, shift)) if shift else start for start in starts]

    def sums(self, packed: PackedType, scale: Any) -> list[Any]:
        """Emit scale x the sum of the integers for each sub-block. `scale` is the result of `scale()`."""
        builder = self._builder
        if packed.sub_blocks == 1:
            return [self._load(linear.SUM, simd.F32)]
        return [builder.fmul(scale, builder.sitofp(builder.neg(self._half_sum(half)), simd.F32)) for half in range(2)]

    def _half_sum(self, half: int) -> Any:
        """Emit the negated sum of the integers in one half of the block as an i32."""
        first = self._load(linear.FIRST_HALF, simd.I32)
        if half == 0:
            return first
        both = self._builder.ashr(self._load(linear.OFFSET, simd.I32), simd.I32(3))
        return self._builder.sub(both, first)

    def _load(self, at: int, llvm_type: Any) -> Any:
        return simd.emit_load(self._builder, simd.emit_offset(self._builder, self._address, at), llvm_type, 4)
