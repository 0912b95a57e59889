"""Unpacks weights into registers: assembles values from their planes, and converts scales and minimums to floats.

Functions named `emit_*` build LLVM IR inside an @intrinsic. A `Place` says which block of 32 columns they read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.quants.weight_type import PackedType, Scales
from llmrun.kernels.code import simd
from llmrun.kernels.code.dots import takes_unsigned
from llmrun.kernels.code.simd import F16X16, F32X16, I8, I8X64, I32X16, I64, constant, emit_load, emit_offset


@dataclass(frozen=True, slots=True)
class Index:
    """An LLVM i64 with the operators that PackedType uses to compute offsets. It is never negative."""

    builder: Any
    value: Any

    def __add__(self, other: Index | int) -> Index:
        return Index(self.builder, self.builder.add(self.value, _word(other)))

    def __sub__(self, other: int) -> Index:
        return self + -other

    def __mul__(self, other: int) -> Index:
        return Index(self.builder, self.builder.mul(self.value, I64(other)))

    def __floordiv__(self, other: int) -> Index:
        return Index(self.builder, self.builder.udiv(self.value, I64(other)))

    def __mod__(self, other: int) -> Index:
        return Index(self.builder, self.builder.urem(self.value, I64(other)))


def _word(value: Index | int) -> Any:
    return value.value if isinstance(value, Index) else I64(value)


@dataclass(frozen=True, slots=True)
class Place:
    """A block of a group, given by LLVM i64 values.

    group  the group's address
    first  the index of the first block of the segment that contains the block. It is given separately, so that
           LLVM moves what depends only on the segment out of the loop over blocks
    block  the block's index
    """

    builder: Any
    group: Any
    first: Any
    block: Any

    def at(self, offset_of: Callable[[Any, Any], Any]) -> Any:
        """Emit the address of a part of the block. `offset_of` is a method of PackedType."""
        place = self.builder.sub(self.block, self.first)
        offset = offset_of(Index(self.builder, self.first), Index(self.builder, place))
        return self.builder.add(self.group, offset.value)


def address_in_group(offset_of: Callable[[Any, Any], Any]) -> Any:
    """Return an intrinsic that maps (group's address, first block, block) to the address of a part of the block.

    `offset_of` is a method of PackedType. See Place.
    """

    @intrinsic
    def address(typingctx: Any, group: Any, first: Any, block: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return Place(builder, *args).at(offset_of)

        return types.int64(*[types.int64] * 3), codegen

    return address


class Weights:
    """The weights of a block as 8 vectors <64 x i8> for dots.py. Vector j holds columns 4j to 4j + 3 of 16 rows.

    Each vector is emitted where it is asked for, so that few registers hold weights at a time.
    """

    def __init__(self, level: str, packed: PackedType, place: Place) -> None:
        self._builder, self._level, self._packed, self._place = place.builder, level, packed, place
        self._loaded: dict[tuple[int, int], Any] = {}

    def emit(self, index: int) -> Any:
        builder, packed = self._builder, self._packed
        if packed.bits == 8:
            vector = self._load(0, index)
            return _emit_biased(builder, vector) if takes_unsigned(self._level, packed) else vector
        vector = self._emit_bits(0, 0, index)
        if len(packed.planes) > 1:
            vector = builder.or_(vector, self._emit_bits(1, packed.planes[0], index))
        if packed.table:
            bias = 128 if takes_unsigned(self._level, packed) else 0
            table = ir.Constant(simd.I8X16, [entry + bias for entry in packed.table])
            vector = emit_lookup(builder, self._level, table, vector)
        return vector

    def _emit_bits(self, plane: int, shift: int, index: int) -> Any:
        """Emit the values of a plane, which has 1, 2 or 4 bits per value, shifted left by `shift`.

        Each of the plane's n vectors packs 8 / bits values into every byte: the lowest bits of vector j belong to
        result j, the next ones to result j + n, and so on.
        """
        builder, bits = self._builder, self._packed.planes[plane]
        n_vectors = bits
        vector, first_bit = self._load(plane, index % n_vectors), bits * (index // n_vectors)
        if first_bit > shift:
            vector = builder.lshr(vector, constant(I8X64, first_bit - shift))
        elif first_bit < shift:
            vector = builder.shl(vector, constant(I8X64, shift - first_bit))
        return builder.and_(vector, constant(I8X64, ((1 << bits) - 1) << shift))

    def _load(self, plane: int, index: int) -> Any:
        if (plane, index) not in self._loaded:
            at = self._place.at(partial(self._packed.values_at, plane))
            self._loaded[plane, index] = emit_load(self._builder, emit_offset(self._builder, at, 64 * index), I8X64, 64)
        return self._loaded[plane, index]


def emit_weights(level: str, packed: PackedType, place: Place) -> list[Any]:
    """Emit the weights as 8 vectors <64 x i8> for dots.emit_dots. Vector j holds columns 4j to 4j + 3 of 16 rows."""
    weights = Weights(level, packed, place)
    return [weights.emit(index) for index in range(8)]


def emit_scales(level: str, packed: PackedType, place: Place) -> list[Any]:
    """Emit the scales, a <16 x float> for each sub-block."""
    builder, at = place.builder, place.at(packed.scales_at)
    if packed.scales is Scales.F16:
        return [_emit_halves(builder, level, at)]
    if packed.scales is Scales.E8M0:
        return [_emit_power_of_two(builder, builder.zext(emit_load(builder, at, simd.I8X16, 16), I32X16))]
    if packed.scales is Scales.F32:
        return [emit_load(builder, emit_offset(builder, at, 64 * sub), F32X16, 64) for sub in range(packed.sub_blocks)]
    return _emit_two_levels(builder, level, packed, at, place.at(packed.upper_scales_at))


def emit_mins(level: str, packed: PackedType, place: Place) -> list[Any]:
    """Emit the minimums, a <16 x float> for each sub-block, or nothing for types without minimums."""
    if not packed.mins:
        return []
    builder, at = place.builder, place.at(packed.mins_at)
    if packed.scales is Scales.F16:
        return [_emit_halves(builder, level, at)]
    return _emit_two_levels(builder, level, packed, at, place.at(packed.upper_mins_at))


def emit_lookup(builder: Any, level: str, table: Any, indices: Any) -> Any:
    """Look up bytes in a table <16 x i8> by indices <64 x i8> or <16 x i8>, each below 16."""
    narrow = indices.type.count == 16
    if narrow and level in ("avx512vnni", "avxvnni", "avx2"):
        return simd.call(builder, "llvm.x86.ssse3.pshuf.b.128", simd.I8X16, [table, indices])
    if narrow and level in simd.NEON:
        return simd.call(builder, "llvm.aarch64.neon.tbl1.v16i8", simd.I8X16, [table, indices])
    if level == "avx512vnni":
        return simd.call(builder, "llvm.x86.avx512.pshuf.b.512", I8X64, [_repeated(table, 4), indices])
    if level in ("avxvnni", "avx2"):
        halves = [simd.emit_part(builder, indices, index, 2) for index in range(2)]
        wide = _repeated(table, 2)
        return simd.emit_join(
            builder, [simd.call(builder, "llvm.x86.avx2.pshuf.b", wide.type, [wide, half]) for half in halves]
        )
    if level in simd.NEON:
        name = "llvm.aarch64.neon.tbl1.v16i8"
        parts = [
            simd.call(builder, name, simd.I8X16, [table, simd.emit_part(builder, indices, index, 4)])
            for index in range(4)
        ]
        return simd.emit_join(builder, [simd.emit_join(builder, parts[:2]), simd.emit_join(builder, parts[2:])])
    found = constant(indices.type, 0)
    for index, entry in enumerate(table.constant):
        here = builder.icmp_unsigned("==", indices, constant(indices.type, index))
        found = builder.select(here, constant(indices.type, entry), found)
    return found


def _repeated(table: Any, times: int) -> Any:
    return ir.Constant(ir.VectorType(I8, 16 * times), list(table.constant) * times)


def _emit_biased(builder: Any, vector: Any) -> Any:
    return builder.xor(vector, constant(I8X64, -128))


def _emit_halves(builder: Any, level: str, at: Any) -> Any:
    return simd.emit_f16_to_f32(builder, level, emit_load(builder, at, F16X16, 2))


def _emit_two_levels(builder: Any, level: str, packed: PackedType, at: Any, upper_at: Any) -> list[Any]:
    above = _emit_halves(builder, level, upper_at)
    scales = []
    for sub in range(packed.sub_blocks):
        integers = builder.sext(emit_load(builder, emit_offset(builder, at, 16 * sub), simd.I8X16, 16), I32X16)
        scales.append(builder.fmul(builder.sitofp(integers, F32X16), above))
    return scales


def _emit_power_of_two(builder: Any, exponents: Any) -> Any:
    """Emit 2^(e - 128), which is half the E8M0 scale because the integers are twice the values.

    Results below 2^-126 are subnormal.
    """
    normal = builder.shl(builder.sub(exponents, constant(I32X16, 1)), constant(I32X16, 23))
    subnormal = builder.shl(constant(I32X16, 0x00200000), exponents)
    small = builder.icmp_unsigned("<", exponents, constant(I32X16, 2))
    return builder.bitcast(builder.select(small, subnormal, normal), F32X16)
