"""Many rows times packed weights: a panel of unpacked weights stays in the cache while tiles of rows pass over it.

A panel holds one group of 16 outputs, block after block: 8 vectors <64 x i8> as dots.Sum takes them, then scales and
minimums, <16 x float> for each sub-block. It is made once for all rows of a step. A tile is some groups x some rows
whose sums live in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels import simd, unpack
from llmrun.kernels.activations import Activations, emit_starts, emit_sums
from llmrun.kernels.dots import new_sum, spread
from llmrun.kernels.packed_types import PackedType

_WORD = types.int64
_LINE = 64


def unpacking(level: str, packed: PackedType) -> Any:
    """Intrinsic: one block of a group's planes into its place in the panel."""

    @intrinsic
    def unpack_block(
        typingctx: Any,
        number: Any,
        scales: Any,
        mins: Any,
        upper_scales: Any,
        upper_mins: Any,
        values: Any,
        more_values: Any,
        to: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, *addresses, to = args
            planes = unpack.Planes(*addresses)
            vectors = unpack.emit_weights(builder, level, packed, planes, number)
            vectors += unpack.emit_scales(builder, level, packed, planes, number)
            vectors += unpack.emit_mins(builder, level, packed, planes, number)
            for index, vector in enumerate(vectors):
                simd.emit_store(builder, simd.emit_offset(builder, to, _LINE * index), vector, _LINE)
            return context.get_dummy_value()

        return types.void(*[_WORD] * 8), codegen

    return unpack_block


class _Panel:
    """A block of a panel at an address."""

    def __init__(self, builder: Any, packed: PackedType, address: Any) -> None:
        self._builder, self._packed, self._address = builder, packed, address

    def weights(self, index: int) -> Any:
        return self._load(index, simd.I8X64)

    def scales(self, sub: int) -> Any:
        return self._load(8 + sub, simd.F32X16)

    def mins(self, sub: int) -> Any:
        return self._load(8 + self._packed.sub_blocks + sub, simd.F32X16)

    def _load(self, line: int, llvm_type: Any) -> Any:
        address = simd.emit_offset(self._builder, self._address, _LINE * line)
        return simd.emit_load(self._builder, address, llvm_type, _LINE)


def tile(level: str, packed: PackedType, groups: int, rows: int) -> tuple[Any, Any, Any]:
    """(zero, block, store) for a tile of `groups` x 16 outputs x `rows` rows."""
    held = simd.tile_type(groups * rows)

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(held.llvm_type, [simd.constant(simd.F32X16, 0.0)] * (groups * rows))

        return held(), codegen

    @intrinsic
    def block(
        typingctx: Any,
        accumulators: Any,
        number: Any,
        panel: Any,
        panel_bytes: Any,
        x: Any,
        x_scales: Any,
        x_offsets: Any,
        x_sums: Any,
        x_half_sums: Any,
        x_stride: Any,
        scale_stride: Any,
    ) -> Any:
        """Add one block of 32 columns, at `panel` for the first group and `panel_bytes` further for each next."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, number, panel, panel_bytes, *addresses, x_stride, scale_stride = args
            panels = [
                _Panel(builder, packed, builder.add(panel, builder.mul(panel_bytes, simd.I64(group))))
                for group in range(groups)
            ]
            activations = [
                Activations.of_row(builder, addresses, number, row, x_stride, scale_stride) for row in range(rows)
            ]
            totals = [builder.extract_value(accumulators, index) for index in range(groups * rows)]
            totals = _emit_tile(builder, level, packed, totals, panels, activations)
            for index, total in enumerate(totals):
                accumulators = builder.insert_value(accumulators, total, index)
            return accumulators

        return held(held, *[_WORD] * 10), codegen

    @intrinsic
    def store(typingctx: Any, accumulators: Any, group: Any, y: Any, y_stride: Any, added: Any) -> Any:
        """Write the rows of one group of the tile; with `added`, onto what is there."""

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

    return zero, block, store


def _emit_tile(
    builder: Any, level: str, packed: PackedType, totals: list[Any], panels: list[_Panel], x: list[Activations]
) -> list[Any]:
    """totals + one block, row after row of each group. For every output the order of floating-point operations is that
    of `linear_reference`."""
    pairs = [(panel, row) for panel in panels for row in x]
    x_scales = [row.load_scale(builder) for row in x]
    spread_scales = [simd.emit_splat(builder, scale) for scale in x_scales] * len(panels)
    dots = [_emit_dots(builder, level, packed, panels, x, sub) for sub in range(packed.sub_blocks)]
    if packed.sub_blocks == 1:
        scales = [panel.scales(0) for panel, _ in pairs]
        products = [
            builder.fmul(scale, spread_scale) for scale, spread_scale in zip(scales, spread_scales, strict=True)
        ]
        totals = [simd.emit_fma(builder, level, *three) for three in zip(dots[0], products, totals, strict=True)]
    else:
        both = [builder.fmul(dot, panel.scales(0)) for dot, (panel, _) in zip(dots[0], pairs, strict=True)]
        both = [
            simd.emit_fma(builder, level, dot, panel.scales(1), first)
            for dot, first, (panel, _) in zip(dots[1], both, pairs, strict=True)
        ]
        totals = [simd.emit_fma(builder, level, *three) for three in zip(both, spread_scales, totals, strict=True)]
    if packed.mins:
        sums = [emit_sums(builder, packed, row, scale) for row, scale in zip(x, x_scales, strict=True)] * len(panels)
        for sub in range(packed.sub_blocks):
            totals = [
                simd.emit_fma(builder, level, panel.mins(sub), simd.emit_splat(builder, of_row[sub]), total)
                for (panel, _), of_row, total in zip(pairs, sums, totals, strict=True)
            ]
    return totals


def _emit_dots(
    builder: Any, level: str, packed: PackedType, panels: list[_Panel], x: list[Activations], sub: int
) -> list[Any]:
    """<16 x float> for each row of each group: dot products of a sub-block. Four columns at a time, so that they are
    loaded once for all groups, and the weights once for all rows."""
    sums = [
        [new_sum(builder, level, packed, emit_starts(builder, level, packed, row)[sub]) for row in x] for _ in panels
    ]
    per_sub = 8 // packed.sub_blocks
    for index in range(sub * per_sub, (sub + 1) * per_sub):
        weights = [panel.weights(index) for panel in panels]
        for number, row in enumerate(x):
            columns = spread(builder, level, row.load_columns(builder, index))
            for group, weight in enumerate(weights):
                sums[group][number].add(weight, columns)
    return [builder.sitofp(one.total(), simd.F32X16) for of_group in sums for one in of_group]
