"""Access to quantized activations inside an @intrinsic, for matrix products. quantize.py writes the activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmrun.kernels.code import simd
from llmrun.kernels.code.dots import bias_of
from llmrun.quants.packed import PackedType


@dataclass(frozen=True, slots=True)
class Activations:
    """The addresses (LLVM i64) of one row's quantized activations for one block of 32 columns."""

    integers: Any
    scale: Any
    offset: Any
    sum: Any
    half_sums: Any

    @classmethod
    def of_row(
        cls, builder: Any, first_row: list[Any], block: Any, row: int, x_stride: Any, scale_stride: Any
    ) -> Activations:
        """Return the addresses for row `row`, a compile-time constant. `first_row` contains the addresses for row 0."""
        strides = [x_stride, *[scale_stride] * 3, builder.mul(scale_stride, simd.I64(2))]
        found = []
        for address, stride, n_bytes in zip(first_row, strides, (32, 4, 4, 4, 8), strict=True):
            start = builder.add(address, builder.mul(stride, simd.I64(row))) if row else address
            found.append(builder.add(start, builder.mul(block, simd.I64(n_bytes))))
        return cls(*found)

    @classmethod
    def of_numbered_row(
        cls, builder: Any, first_row: list[Any], block: Any, row: Any, x_stride: Any, scale_stride: Any
    ) -> Activations:
        """Return the addresses for row `row`, an LLVM i64 known only at run time."""
        strides = [x_stride, *[scale_stride] * 3, builder.mul(scale_stride, simd.I64(2))]
        found = []
        for address, stride, n_bytes in zip(first_row, strides, (32, 4, 4, 4, 8), strict=True):
            start = builder.add(address, builder.mul(stride, row))
            found.append(builder.add(start, builder.mul(block, simd.I64(n_bytes))))
        return cls(*found)

    def load_columns(self, builder: Any, index: int) -> Any:
        """Load columns 4 * index to 4 * index + 3 as an i32."""
        return simd.emit_load(builder, simd.emit_offset(builder, self.integers, 4 * index), simd.I32, 4)

    def load_scale(self, builder: Any) -> Any:
        return simd.emit_load(builder, self.scale, simd.F32, 4)

    def load_half_sum(self, builder: Any, half: int) -> Any:
        """Load the negated sum of the integers in one half of the block as an i32."""
        return simd.emit_load(builder, simd.emit_offset(builder, self.half_sums, 4 * half), simd.I32, 4)


def emit_starts(builder: Any, level: str, packed: PackedType, x: Activations) -> list[Any]:
    """Emit -bias x the sum of the activations for each sub-block, in all lanes.

    quantize.py stores -8 x the sum of the block and -1 x the sum of each half. Biases are powers of two, so a shift
    is sufficient.
    """
    bias = bias_of(level, packed)
    if bias == 0:
        return [simd.constant(simd.I32X16, 0)] * packed.sub_blocks
    if packed.sub_blocks == 1:
        shift, sums = bias.bit_length() - 1 - 3, [simd.emit_load(builder, x.offset, simd.I32, 4)]
    else:
        shift, sums = bias.bit_length() - 1, [x.load_half_sum(builder, half) for half in range(2)]
    starts = [simd.emit_splat(builder, total) for total in sums]
    return [builder.shl(start, simd.constant(simd.I32X16, shift)) if shift else start for start in starts]


def emit_sums(builder: Any, packed: PackedType, x: Activations, x_scale: Any) -> list[Any]:
    """Emit scale x the sum of the activations for each sub-block."""
    if packed.sub_blocks == 1:
        return [simd.emit_load(builder, x.sum, simd.F32, 4)]
    halves = [x.load_half_sum(builder, half) for half in range(2)]
    return [builder.fmul(x_scale, builder.sitofp(builder.neg(half), simd.F32)) for half in halves]
