"""Integer dot products of a block of 32 columns for 16 outputs, each instruction level in its own way.

A block's weights are 8 vectors <64 x i8>; vector j holds columns 4j to 4j + 3 of 16 rows. Types of up to 6 bits come as
unsigned values, whose zero point is taken off through the sum of the activations; 8-bit types and tables as signed
bytes. Sums are exact integers, equal at every level.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from llmrun.kernels import simd
from llmrun.kernels.packed_types import PackedType
from llmrun.kernels.simd import I8, I8X64, I16, I32, I32X16, call, constant

_VNNI = ("avx512vnni", "avxvnni")
_I32X8, _I16X16, _I8X32 = ir.VectorType(I32, 8), ir.VectorType(I16, 16), ir.VectorType(I8, 32)
_I32X4, _I8X16 = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
_ACTIVATION = 127  # the largest
_LARGEST_I16 = 32767


def takes_unsigned(level: str, packed: PackedType) -> bool:
    """Whether `emit_dots` wants the weights of this type as unsigned bytes, `bias_of` above what they stand for."""
    return level in _VNNI or not packed.is_signed


def bias_of(level: str, packed: PackedType) -> int:
    """What every weight byte is too large by: `emit_dots` is to start from -bias x the sum of the activations."""
    if not packed.is_signed:
        return packed.zero
    return 128 if takes_unsigned(level, packed) else 0


def emit_dots(
    builder: Any, level: str, packed: PackedType, weights: list[Any], activations: list[Any], starts: list[Any]
) -> list[Any]:
    """<16 x i32> for each sub-block: starts + weights . activations.

    weights      8 vectors <64 x i8>
    activations  8 i32, each 4 columns of int8
    starts       <16 x i32> for each sub-block
    """
    per_sub = len(weights) // len(starts)
    return [
        _EMITTERS[level](
            builder,
            packed,
            weights[sub * per_sub : (sub + 1) * per_sub],
            activations[sub * per_sub : (sub + 1) * per_sub],
            start,
        )
        for sub, start in enumerate(starts)
    ]


def _emit_avx512(builder: Any, packed: PackedType, weights: list[Any], activations: list[Any], start: Any) -> Any:
    """Two chains of `vpdpbusd` halve the latency; integers do not mind the order."""
    chains = [start, constant(I32X16, 0)]
    for index, (weight, activation) in enumerate(zip(weights, activations, strict=True)):
        spread = builder.bitcast(simd.emit_splat(builder, activation), I8X64)
        chain = chains[index & 1]
        chains[index & 1] = call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [chain, weight, spread])
    return builder.add(*chains)


def _emit_avxvnni(builder: Any, packed: PackedType, weights: list[Any], activations: list[Any], start: Any) -> Any:
    halves = [simd.emit_part(builder, start, index, 2) for index in range(2)]
    for weight, activation in zip(weights, activations, strict=True):
        spread = builder.bitcast(simd.emit_splat(builder, activation, 8), _I8X32)
        for index in range(2):
            part = simd.emit_part(builder, weight, index, 2)
            halves[index] = call(builder, "llvm.x86.avx512.vpdpbusd.256", _I32X8, [halves[index], part, spread])
    return simd.emit_join(builder, halves)


def _emit_avx2(builder: Any, packed: PackedType, weights: list[Any], activations: list[Any], start: Any) -> Any:
    """`pmaddubsw` adds two products in 16 bits and saturates: signed bytes go in as magnitudes, their signs given to
    the activations. As many as cannot overflow are added there, before `pmaddwd` widens them."""
    largest = 128 if packed.is_signed else (1 << packed.bits) - 1
    together = min(len(weights), _LARGEST_I16 // (2 * largest * _ACTIVATION))
    ones = constant(_I16X16, 1)
    halves = []
    for index in range(2):
        total = simd.emit_part(builder, start, index, 2)
        for first in range(0, len(weights), together):
            pairs = [
                _emit_pairs(builder, packed, simd.emit_part(builder, weight, index, 2), activation)
                for weight, activation in zip(
                    weights[first : first + together], activations[first : first + together], strict=True
                )
            ]
            wide = call(builder, "llvm.x86.avx2.pmadd.wd", _I32X8, [_emit_sum(builder, pairs), ones])
            total = builder.add(total, wide)
        halves.append(total)
    return simd.emit_join(builder, halves)


def _emit_pairs(builder: Any, packed: PackedType, weight: Any, activation: Any) -> Any:
    """<16 x i16>: products of 32 bytes, added in twos."""
    spread = builder.bitcast(simd.emit_splat(builder, activation, 8), _I8X32)
    if packed.is_signed:
        spread = call(builder, "llvm.x86.avx2.psign.b", _I8X32, [spread, weight])
        negative = builder.sub(constant(_I8X32, 0), weight)
        weight = builder.select(builder.icmp_signed("<", weight, constant(_I8X32, 0)), negative, weight)
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", _I16X16, [weight, spread])


def _emit_neon(builder: Any, packed: PackedType, weights: list[Any], activations: list[Any], start: Any) -> Any:
    quarters = [simd.emit_part(builder, start, index, 4) for index in range(4)]
    for weight, activation in zip(weights, activations, strict=True):
        spread = builder.bitcast(simd.emit_splat(builder, activation, 4), _I8X16)
        for index in range(4):
            part = simd.emit_part(builder, weight, index, 4)
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            quarters[index] = call(builder, name, _I32X4, [quarters[index], part, spread])
    return simd.emit_join(builder, [simd.emit_join(builder, quarters[:2]), simd.emit_join(builder, quarters[2:])])


def _emit_portable(builder: Any, packed: PackedType, weights: list[Any], activations: list[Any], start: Any) -> Any:
    """Through 16-bit lanes: even and odd bytes widen apart, so that LLVM finds `pmaddwd` and nothing saturates."""
    for weight, activation in zip(weights, activations, strict=True):
        spread = builder.bitcast(simd.emit_splat(builder, activation), I8X64)
        for first in (0, 2):
            lanes = [4 * lane + first + offset for lane in range(16) for offset in (0, 1)]
            mask, wide = ir.Constant(ir.VectorType(I32, 32), lanes), ir.VectorType(I32, 32)
            w = builder.sext(builder.shuffle_vector(weight, weight, mask), wide)
            x = builder.sext(builder.shuffle_vector(spread, spread, mask), wide)
            product = builder.mul(w, x)
            even = ir.Constant(I32X16, list(range(0, 32, 2)))
            odd = ir.Constant(I32X16, list(range(1, 32, 2)))
            evens = builder.shuffle_vector(product, product, even)
            start = builder.add(start, builder.add(evens, builder.shuffle_vector(product, product, odd)))
    return start


def _emit_sum(builder: Any, values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = builder.add(total, value)
    return total


_EMITTERS = {
    "avx512vnni": _emit_avx512,
    "avxvnni": _emit_avxvnni,
    "avx2": _emit_avx2,
    "neondot": _emit_neon,
    "portable": _emit_portable,
}
