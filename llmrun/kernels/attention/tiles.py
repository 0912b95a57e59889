"""Tiles of accumulators for attention. For several queries, a tile holds either the scores of one or two vectors of
positions or the weighted sums of one or two vectors of features.

Each kind of tile has three functions: (zero or load, step, store). A key or value is converted to float32 only once for
all queries of a tile. Scales are applied outside the inner loop. The scales of keys multiply the sums of a group, and
the scales of values multiply the weights.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.kv import BLOCK, CHUNK, HeadLayout, KVType, state_floats
from llmrun.formats.quants.table_quants import IQ4_VALUES as TABLE
from llmrun.kernels.code import simd
from llmrun.kernels.code.unpack import emit_lookup

# LLVM's names for the vector registers of each instruction-set level.
_REGISTERS = {
    "avx512vnni": [f"zmm{number}" for number in range(32)],
    "avxvnni": [f"ymm{number}" for number in range(16)],
    "avx2": [f"ymm{number}" for number in range(16)],
    **{level: [f"v{number}" for number in range(32)] for level in simd.NEON},
}


def _emit_free_registers(builder: Any, level: str) -> None:
    """Make LLVM free all vector registers, by marking them as clobbered before and after a tile.

    Otherwise, LLVM keeps constants of the surrounding code in registers and spills the tile's accumulators instead.
    Without this workaround, half of the 16 accumulators would be stored and reloaded in each step.
    """
    changed = ",".join(f"~{{{name}}}" for name in _REGISTERS.get(level, []))
    if changed:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", changed, [], True)


def _zero(level: str, vectors: int) -> Any:
    tile = simd.tile_type(vectors)

    @intrinsic
    def zero(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_free_registers(builder, level)
            return ir.Constant(tile.llvm_type, [simd.constant(simd.F32X16, 0.0)] * vectors)

        return tile(), codegen

    return zero


def _emit_elements(builder: Any, level: str, kind: KVType, address: Any) -> Any:
    """Load 16 elements of the cache as floats, without applying their scales.

    The elements are features of a value, or positions of a key's feature in a type without nibbles.
    """
    if kind.bits == 16:
        return simd.emit_f16_to_f32(builder, level, simd.emit_load(builder, address, simd.F16X16, 2))
    if kind.bits == 8:
        return _emit_floats(builder, simd.emit_load(builder, address, simd.I8X16))
    return _emit_entries(builder, level, simd.emit_join(builder, _emit_nibbles(builder, address, simd.LANES // 2)))


def _emit_key_row(builder: Any, level: str, layout: HeadLayout, address: Any, vectors: int) -> list[list[Any]]:
    """Load a row of keys. Returns vectors of positions for each of the row's features."""
    vector_bytes = layout.key_row_bytes * simd.LANES // BLOCK
    starts = [simd.emit_offset(builder, address, vector_bytes * index) for index in range(vectors)]
    if layout.row_features == 1:
        return [[_emit_elements(builder, level, layout.keys, start) for start in starts]]
    pairs = [_emit_nibbles(builder, start, simd.LANES) for start in starts]
    return [[_emit_entries(builder, level, pair[half]) for pair in pairs] for half in range(2)]


def _emit_nibbles(builder: Any, address: Any, n_bytes: int) -> list[Any]:
    """Load bytes and return the vectors of their low and high halves."""
    halves = simd.emit_load(builder, address, ir.VectorType(simd.I8, n_bytes))
    low = builder.and_(halves, simd.constant(halves.type, 15))
    return [low, builder.lshr(halves, simd.constant(halves.type, 4))]


def _emit_entries(builder: Any, level: str, indices: Any) -> Any:
    """Look up entries of the table, and return them as floats."""
    return _emit_floats(builder, emit_lookup(builder, level, ir.Constant(simd.I8X16, TABLE.tolist()), indices))


def _emit_floats(builder: Any, integers: Any) -> Any:
    return builder.sitofp(builder.sext(integers, simd.I32X16), simd.F32X16)


def load_elements(level: str, kind: KVType) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _emit_elements(builder, level, kind, args[0])

        return simd.f32x16(types.int64), codegen

    return load


def load_half(level: str) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            halves = simd.emit_splat(builder, simd.emit_load(builder, args[0], simd.F16, 2))
            return builder.extract_element(simd.emit_f16_to_f32(builder, level, halves), simd.I32(0))

        return types.float32(types.int64), codegen

    return load


def scores(level: str, layout: HeadLayout, heads: int, rows: int, vectors: int) -> tuple[Any, Any, Any]:
    """Return (zero, step, store) for scores over a group of features, with `vectors` vectors of positions per query."""
    tile = simd.tile_type(vectors * heads * rows)
    word = types.int64

    @intrinsic
    def step(typingctx: Any, tile_now: Any, keys: Any, query: Any, query_stride: Any) -> Any:
        """Add the products of a row of keys, which holds one or two features, and the same features of the queries."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, keys, query, query_stride = args
            for feature, of_positions in enumerate(_emit_key_row(builder, level, layout, keys, vectors)):
                for index in range(heads * rows):
                    of_row = builder.add(query, builder.mul(query_stride, simd.I64(index // heads)))
                    of_head = simd.emit_offset(builder, of_row, 4 * (layout.head_size * (index % heads) + feature))
                    value = simd.emit_splat(builder, simd.emit_load(builder, of_head, simd.F32, 4))
                    for vector, key in enumerate(of_positions):
                        total = builder.extract_value(accumulators, vectors * index + vector)
                        total = simd.emit_fma(builder, level, value, key, total)
                        accumulators = builder.insert_value(accumulators, total, vectors * index + vector)
            return accumulators

        return tile(tile, word, word, word), codegen

    @intrinsic
    def store(typingctx: Any, tile_now: Any, scores: Any, scale: Any, key_scales: Any, group: Any) -> Any:
        """Write the scores to `scores`, a float32[queries, CHUNK]. All features form a single group here."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, scores, scale, _, _ = args
            factor = simd.emit_splat(builder, scale)
            for index in range(vectors * heads * rows):
                at = simd.emit_offset(builder, scores, 4 * CHUNK * (index // vectors) + 64 * (index % vectors))
                simd.emit_store(builder, at, builder.fmul(builder.extract_value(accumulators, index), factor), 4)
            _emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, types.float32, word, word), codegen

    @intrinsic
    def store_scaled(typingctx: Any, tile_now: Any, scores: Any, scale: Any, key_scales: Any, group: Any) -> Any:
        """Add the contribution of a group to the scores, or overwrite them if the group is the first."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, scores, scale, key_scales, group = args
            of_positions = [
                builder.fmul(simd.emit_f16_to_f32(builder, level, halves), simd.emit_splat(builder, scale))
                for halves in (
                    simd.emit_load(builder, simd.emit_offset(builder, key_scales, shift), simd.F16X16, 2)
                    for shift in range(0, 32 * vectors, 32)
                )
            ]
            is_first = builder.icmp_signed("==", group, simd.I64(0))
            for index in range(vectors * heads * rows):
                at = simd.emit_offset(builder, scores, 4 * CHUNK * (index // vectors) + 64 * (index % vectors))
                before = simd.emit_load(builder, at, simd.F32X16, 4)
                before = builder.select(is_first, simd.constant(simd.F32X16, 0.0), before)
                products = builder.extract_value(accumulators, index)
                total = simd.emit_fma(builder, level, products, of_positions[index % vectors], before)
                simd.emit_store(builder, at, total, 4)
            _emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word, types.float32, word, word), codegen

    return _zero(level, vectors * heads * rows), step, store_scaled if layout.keys.has_scales else store


def weighted_values(level: str, layout: HeadLayout, queries: int, vectors: int) -> tuple[Any, Any, Any]:
    """Return (load, step, store) for adding weighted values to the states, with `vectors` vectors per query."""
    tile = simd.tile_type(vectors * queries)
    word = types.int64
    places = [
        4 * state_floats(layout.value_size) * query + 64 * vector
        for query in range(queries)
        for vector in range(vectors)
    ]

    @intrinsic
    def load(typingctx: Any, states: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_free_registers(builder, level)
            accumulators = ir.Constant(tile.llvm_type, ir.Undefined)
            for index, place in enumerate(places):
                sums = simd.emit_load(builder, simd.emit_offset(builder, args[0], place), simd.F32X16, 4)
                accumulators = builder.insert_value(accumulators, sums, index)
            return accumulators

        return tile(word), codegen

    @intrinsic
    def step(typingctx: Any, tile_now: Any, value: Any, weights: Any) -> Any:
        """Add the weighted value of one position."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, value, weights = args
            vector_bytes = layout.values.n_bytes(simd.LANES)
            starts = [simd.emit_offset(builder, value, vector_bytes * index) for index in range(vectors)]
            features = [_emit_elements(builder, level, layout.values, start) for start in starts]
            for query in range(queries):
                at = simd.emit_offset(builder, weights, 4 * CHUNK * query)
                weight = simd.emit_splat(builder, simd.emit_load(builder, at, simd.F32, 4))
                for index, feature in enumerate(features):
                    total = builder.extract_value(accumulators, vectors * query + index)
                    total = simd.emit_fma(builder, level, weight, feature, total)
                    accumulators = builder.insert_value(accumulators, total, vectors * query + index)
            return accumulators

        return tile(tile, word, word), codegen

    @intrinsic
    def store(typingctx: Any, tile_now: Any, states: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            accumulators, states = args
            for index, place in enumerate(places):
                at = simd.emit_offset(builder, states, place)
                simd.emit_store(builder, at, builder.extract_value(accumulators, index), 4)
            _emit_free_registers(builder, level)
            return context.get_dummy_value()

        return types.void(tile, word), codegen

    return load, step, store
