"""Tiles for matrix products with packed weights. A tile covers a few groups of 16 outputs for a few rows, and keeps
all sums in registers.

The weights of a tile are read either from a packed group or from a panel. A panel is an unpacked copy of a
group, which is created once for all rows of a step and stays in the CPU cache while they are processed. For each block,
it contains 8 vectors <64 x i8> for dots.Sum, followed by the scales and minimums, a <16 x float> for each sub-block. At
levels that multiply pairs of rows, the vectors are in the order of dots.emit_paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import simd, unpack
from llmrun.kernels.code.dots import (
    broadcast,
    emit_dots,
    emit_in_order,
    emit_pair_dots,
    emit_paired,
    emit_total,
    multiplies_pairs,
    new_chains,
)
from llmrun.kernels.linear.activations import Activations

_WORD = types.int64
_LINE = 64

# Levels with 16 registers of 32 bytes. There, a block of 16 outputs of one row is computed as two halves, because LLVM
# would otherwise interleave them and move up to 30 vectors per block to the stack and back (Q6_K). The table shows GB/s
# on an AMD Zen 3 with AVX2, for weights larger than the caches (medians of 20 and 8 alternating rounds):
#
#                         Q4_0   Q4_K   Q6_K   Q8_0   IQ4_XS
#   one thread, at once   18.8   20.0   14.9   17.7     14.9
#   one thread, halves    19.3   19.3   15.7   20.3     17.3
#   two threads, at once  24.6   31.2          23.2
#   two threads, halves   26.3   31.1          24.5
_FEW_REGISTERS = ("avx2", "avxvnni")


def unpacking(level: str, packed: PackedType) -> Any:
    """Return an intrinsic that unpacks one block of a group into the panel."""

    @intrinsic
    def unpack_block(typingctx: Any, group: Any, first: Any, number: Any, to: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            group, first, number, to = args
            place = unpack.Place(builder, group, first, number)
            vectors = unpack.emit_weights(level, packed, place)
            if multiplies_pairs(level):
                vectors = emit_paired(builder, vectors)
            vectors += unpack.emit_scales(level, packed, place)
            vectors += unpack.emit_mins(level, packed, place)
            for index, vector in enumerate(vectors):
                simd.emit_store(builder, simd.emit_offset(builder, to, _LINE * index), vector, _LINE)
            return context.get_dummy_value()

        return types.void(*[_WORD] * 4), codegen

    return unpack_block


class Block(Protocol):
    """One block of 32 columns of a group."""

    in_pairs: bool  # whether the weights are in the order of dots.emit_paired

    def weights(self, index: int) -> Any:
        """Return columns 4 * index to 4 * index + 3 of 16 rows as a <64 x i8>, or a vector of dots.emit_paired."""
        ...

    def scales(self, sub: int) -> Any:
        """Return the scales of a sub-block as a <16 x float>."""
        ...

    def mins(self, sub: int) -> Any:
        """Return the minimums of a sub-block as a <16 x float>."""
        ...


class PackedBlock:
    """A block read from a packed group."""

    in_pairs = False

    def __init__(self, level: str, packed: PackedType, place: unpack.Place) -> None:
        self._of = level, packed, place
        self._weights = unpack.Weights(*self._of)
        self._scales: list[Any] = []
        self._mins: list[Any] = []

    def weights(self, index: int) -> Any:
        return self._weights.emit(index)

    def scales(self, sub: int) -> Any:
        self._scales = self._scales or unpack.emit_scales(*self._of)
        return self._scales[sub]

    def mins(self, sub: int) -> Any:
        self._mins = self._mins or unpack.emit_mins(*self._of)
        return self._mins[sub]


class _PanelBlock:
    """A block read from a panel."""

    def __init__(self, builder: Any, level: str, packed: PackedType, address: Any) -> None:
        self._builder, self._packed, self._address = builder, packed, address
        self.in_pairs = multiplies_pairs(level)

    def weights(self, index: int) -> Any:
        return self._load(index, simd.I8X64)

    def scales(self, sub: int) -> Any:
        return self._load(8 + sub, simd.F32X16)

    def mins(self, sub: int) -> Any:
        return self._load(8 + self._packed.sub_blocks + sub, simd.F32X16)

    def _load(self, line: int, llvm_type: Any) -> Any:
        address = simd.emit_offset(self._builder, self._address, _LINE * line)
        return simd.emit_load(self._builder, address, llvm_type, _LINE)


def single_row(level: str, packed: PackedType) -> tuple[Any, Any, Any]:
    """Return (zero, block, store) for 16 outputs of one row, with weights read from a packed group."""
    vector = simd.f32x16

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return simd.constant(simd.F32X16, 0.0)

        return vector(), codegen

    @intrinsic
    def block(typingctx: Any, total: Any, group: Any, first: Any, number: Any, x: Any) -> Any:
        """Add the products of one block of 32 columns to `total`."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            total, group, first, number, row = args

            def emit_whole() -> Any:
                weights = PackedBlock(level, packed, unpack.Place(builder, group, first, number))
                return _emit_tile(builder, level, packed, [total], [weights], [Activations(builder, row, number)])[0]

            if level not in _FEW_REGISTERS:
                return emit_whole()
            halves = []
            for half in range(2):
                _emit_barrier(builder)
                halves.append(simd.emit_part(builder, emit_whole(), half, 2))  # LLVM removes the other half
            return simd.emit_join(builder, halves)

        return vector(vector, *[_WORD] * 4), codegen

    @intrinsic
    def store(typingctx: Any, total: Any, y: Any, added: Any) -> Any:
        """Store 16 outputs, or add them to the values in memory if `added` is set."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            total, y, added = args
            simd.emit_store_or_add(builder, y, total, builder.icmp_signed("!=", added, simd.I64(0)))
            return context.get_dummy_value()

        return types.void(vector, _WORD, _WORD), codegen

    return zero, block, store


class Tile(NamedTuple):
    """The intrinsics of a tile."""

    zero: Any
    block: Any
    block_of_numbered: Any
    store: Any


def tile(level: str, packed: PackedType, groups: int, rows: int) -> Tile:
    """Return the intrinsics for a tile of `groups` x 16 outputs x `rows` rows, with weights read from panels."""
    held = simd.tile_type(groups * rows)

    def add_block(builder: Any, accumulators: Any, panel: Any, panel_bytes: Any, x: list[Activations]) -> Any:
        panels = [
            _PanelBlock(builder, level, packed, builder.add(panel, builder.mul(panel_bytes, simd.I64(group))))
            for group in range(groups)
        ]
        return emit_block(builder, level, packed, accumulators, panels, x)

    @intrinsic
    def block(
        typingctx: Any,
        accumulators: Any,
        number: Any,
        panel: Any,
        panel_bytes: Any,
        x: Any,
        x_stride: Any,
    ) -> Any:
        """Add one block of 32 columns.

        The first group's block is at `panel`, and each further group's block is `panel_bytes` bytes after the previous
        one.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, number, panel, panel_bytes, x, x_stride = args
            addresses = [builder.add(x, builder.mul(x_stride, simd.I64(row))) for row in range(rows)]
            activations = [Activations(builder, row, number) for row in addresses]
            return add_block(builder, accumulators, panel, panel_bytes, activations)

        return held(held, *[_WORD] * 5), codegen

    @intrinsic
    def block_of_numbered(
        typingctx: Any,
        accumulators: Any,
        number: Any,
        panel: Any,
        panel_bytes: Any,
        x: Any,
        x_stride: Any,
        numbers: Any,
    ) -> Any:
        """Add one block in the same way as `block`, but for the rows whose indices are in the int32[rows] at `numbers`.

        `x` is the address of row 0.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, number, panel, panel_bytes, x, x_stride, numbers = args
            activations = []
            for index in range(rows):
                row = simd.emit_load(builder, simd.emit_offset(builder, numbers, 4 * index), simd.I32, 4)
                address = builder.add(x, builder.mul(x_stride, builder.zext(row, simd.I64)))
                activations.append(Activations(builder, address, number))
            return add_block(builder, accumulators, panel, panel_bytes, activations)

        return held(held, *[_WORD] * 6), codegen

    @intrinsic
    def store(typingctx: Any, accumulators: Any, group: Any, y: Any, y_stride: Any, added: Any) -> Any:
        """Store the rows of one group of the tile, or add them to the values in memory if `added` is set."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, group, y, y_stride, added = args
            adds = builder.icmp_signed("!=", added, simd.I64(0))
            for index in range(groups):
                with builder.if_then(builder.icmp_signed("==", group, simd.I64(index))):
                    for row in range(rows):
                        address = builder.add(y, builder.mul(y_stride, simd.I64(row)))
                        value = builder.extract_value(accumulators, index * rows + row)
                        simd.emit_store_or_add(builder, address, value, adds)
            return context.get_dummy_value()

        return types.void(held, *[_WORD] * 4), codegen

    return Tile(zero_tile(held), block, block_of_numbered, store)


def zero_tile(held: simd.VectorType) -> Any:
    """Return an intrinsic for the accumulators of an empty tile."""

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(held.llvm_type, [simd.constant(simd.F32X16, 0.0)] * held.llvm_type.count)

        return held(), codegen

    return zero


def emit_block(
    builder: Any, level: str, packed: PackedType, accumulators: Any, blocks: Sequence[Block], x: list[Activations]
) -> Any:
    """Add one block to the accumulators of a tile, which are ordered by group and then by row."""
    totals = [builder.extract_value(accumulators, index) for index in range(len(blocks) * len(x))]
    for index, total in enumerate(_emit_tile(builder, level, packed, totals, blocks, x)):
        accumulators = builder.insert_value(accumulators, total, index)
    return accumulators


def _emit_tile(
    builder: Any, level: str, packed: PackedType, totals: list[Any], blocks: Sequence[Block], x: list[Activations]
) -> list[Any]:
    """Add one block to the totals, which are ordered by group and then by row.

    For every output, the floating-point operations happen in the same order as in `integer_linear_reference`.
    """
    pairs = [(block, row) for block in blocks for row in x]
    dots = [_emit_dots(builder, level, packed, blocks, x, sub) for sub in range(packed.sub_blocks)]
    x_scales = [row.scale() for row in x]
    broadcast_scales = [simd.emit_splat(builder, scale) for scale in x_scales] * len(blocks)
    if packed.sub_blocks == 1:
        products = [
            builder.fmul(block.scales(0), scale) for (block, _), scale in zip(pairs, broadcast_scales, strict=True)
        ]
        totals = [simd.emit_fma(builder, level, *three) for three in zip(dots[0], products, totals, strict=True)]
    else:
        both = [builder.fmul(dot, block.scales(0)) for dot, (block, _) in zip(dots[0], pairs, strict=True)]
        both = [
            simd.emit_fma(builder, level, dot, block.scales(1), first)
            for dot, first, (block, _) in zip(dots[1], both, pairs, strict=True)
        ]
        totals = [simd.emit_fma(builder, level, *three) for three in zip(both, broadcast_scales, totals, strict=True)]
    if packed.mins:
        sums = [row.sums(packed, scale) for row, scale in zip(x, x_scales, strict=True)] * len(blocks)
        for sub in range(packed.sub_blocks):
            totals = [
                simd.emit_fma(builder, level, block.mins(sub), simd.emit_splat(builder, of_row[sub]), total)
                for (block, _), of_row, total in zip(pairs, sums, totals, strict=True)
            ]
    return totals


def _emit_dots(
    builder: Any, level: str, packed: PackedType, blocks: Sequence[Block], x: list[Activations], sub: int
) -> list[Any]:
    """Emit the dot products of a sub-block as a <16 x float> for each row of each group.

    It processes four columns at a time, so that activations are loaded only once for all groups and weights only once
    for all rows.
    """
    starts = [row.starts(level, packed)[sub] for row in x]
    indices = range(8 // packed.sub_blocks * sub, 8 // packed.sub_blocks * (sub + 1))
    if blocks[0].in_pairs:
        return [
            builder.sitofp(dot, simd.F32X16)
            for block in blocks
            for two in range(0, len(x), 2)
            for dot in emit_pair_dots(
                builder,
                [block.weights(index) for index in indices],
                [[row.sixteen(index // 4) for index in indices[::4]] for row in x[two : two + 2]],
                starts[two : two + 2],
            )
        ]
    if len(blocks) * len(x) == 1:
        weights = [blocks[0].weights(index) for index in indices]
        columns = [x[0].columns(index) for index in indices]
        return [builder.sitofp(emit_dots(builder, level, packed, weights, columns, starts)[0], simd.F32X16)]
    chains = [new_chains(builder, level, packed, start, len(blocks) * len(x)) for _ in blocks for start in starts]
    # Vectors whose indices differ by 4 share a load of 4-bit values.
    for number, index in enumerate(sorted(indices, key=lambda index: index % 4)):
        weights = [block.weights(index) for block in blocks]
        sums = [of_output[number % len(of_output)] for of_output in chains]
        for row, activations in enumerate(x):
            four = broadcast(builder, level, activations.columns(index))
            for group, weight in enumerate(weights):
                sums[group * len(x) + row].add(weight, four)
        emit_in_order(builder, level, sums)
    return [builder.sitofp(emit_total(builder, of_output), simd.F32X16) for of_output in chains]


def _emit_barrier(builder: Any) -> None:
    """Keep LLVM from moving loads and stores across this place. It emits no instruction."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
