"""Functions that store keys and values in each type of KV cache (layouts/kv.py). stored_kv.py contains their twins."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts.kv import BLOCK, GROUP, QUAD, HeadLayout, KVType, n_groups
from llmrun.formats.quants.table_quants import IQ4_VALUES as TABLE
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import hidden
from llmrun.kernels.code.unpack import emit_lookup
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.model.plan.stored_kv import BOUNDS, LEAST, STRETCHES

_I8X16 = ir.VectorType(simd.I8, simd.LANES)
# The lanes of the low and high halves of 8 bytes: of a value, and of a key.
_SHARED_BYTES = ([[*range(8)], [*range(8, 16)]], [[*range(0, 16, 2)], [*range(1, 16, 2)]])


def storing(level: str, layout: HeadLayout) -> tuple[Any, Any]:
    """Return (store_key, store_value) for one head.

    Both functions take the address of the float32 vector, which is already rotated, the address of the head's part of a
    block, and the slot in that block.
    """
    write_key = _storing(level, layout.keys, layout.head_size, layout.key_row_bytes // BLOCK, BLOCK)
    value_bytes = layout.values.n_bytes(layout.value_size)
    if layout.values.bits == 8:
        write_value = _storing_quads(level, layout.value_size)
    else:
        write_value = _storing(level, layout.values, layout.value_size, value_bytes, 1)
    key_scales, values_at, value_scales = layout.key_scales, layout.values_at, layout.value_scales

    @inline_function
    def store_key(key: Any, block: Any, slot: Any) -> Any:
        write_key(key, block, slot, block + key_scales + 2 * slot)

    @inline_function
    def store_value(value: Any, block: Any, slot: Any) -> Any:
        write_value(value, block + values_at, slot, block + value_scales + 2 * slot)

    return store_key, store_value


def _storing(level: str, kind: KVType, size: int, slot_bytes: int, spacing: int) -> Any:
    """Return a function that stores `size` features whose elements are `spacing` elements apart.

    It takes the addresses of the features, of the first element of slot 0, the slot, and the address of the scale of
    the first group. Elements of neighbouring slots are `slot_bytes` apart.
    """
    begin = {16: _begin_plain, 8: _begin_bytes, 4: _begin_nibbles}[kind.bits](level)
    write = {16: _write_halves, 8: _write_quads, 4: _write_nibbles}[kind.bits](level, spacing)
    groups, feature_bits = n_groups(size), kind.bits * spacing

    @inline_function
    def store(x: Any, elements: Any, slot: Any, scales: Any) -> Any:
        for group in range(groups):
            first = GROUP * group
            n_vectors = min(GROUP, size - first) // simd.LANES
            factor = begin(x + 4 * first, n_vectors, scales + 2 * BLOCK * group)
            for feature in range(first, first + simd.LANES * n_vectors, simd.LANES):
                scaled = simd.multiply(simd.load_f32x16(x + 4 * feature), simd.splat(factor))
                write(elements + slot_bytes * slot + feature_bits * feature // 8, scaled)

    return store


def _storing_quads(level: str, size: int) -> Any:
    """Return a function that stores `size` features as int8, with 4 slots of each feature next to each other.

    It takes the same arguments as the function that `_storing` returns.
    """
    begin, write = _begin_bytes(level), write_bytes(QUAD)
    groups = n_groups(size)

    @inline_function
    def store(x: Any, elements: Any, slot: Any, scales: Any) -> Any:
        for group in range(groups):
            first = GROUP * group
            features = min(GROUP, size - first)
            factor = begin(x + 4 * first, features // simd.LANES, scales + 2 * BLOCK * group)
            of_slot = elements + BLOCK * first + slot // QUAD * (QUAD * features) + slot % QUAD
            for feature in range(0, features, simd.LANES):
                scaled = simd.multiply(simd.load_f32x16(x + 4 * (first + feature)), simd.splat(factor))
                write(of_slot + QUAD * feature, scaled)

    return store


# Each `begin` function stores the scale of a group, if the type has scales, and returns the factor by which the numbers
# are multiplied before they are rounded. A NaN or an infinity in the group makes the scale NaN.


def _begin_plain(level: str) -> Any:
    @inline_function
    def begin(x: Any, n_vectors: Any, address: Any) -> Any:
        return types.float32(1)

    return begin


def _begin_bytes(level: str) -> Any:
    store_half = _store_half(level)

    @inline_function
    def begin(x: Any, n_vectors: Any, address: Any) -> Any:
        largest = simd.splat(types.float32(0))
        for vector in range(n_vectors):
            largest = simd.maximum(simd.absolute(simd.load_f32x16(x + 64 * vector)), largest)
        scale = simd.max_lanes(largest) / types.float32(127) + nan_unless_finite(x, n_vectors)
        scale = store_half(address, scale)
        return types.float32(1) / scale if scale > types.float32(0) else types.float32(0)

    return begin


def _begin_nibbles(level: str) -> Any:
    store_half, entries = _store_half(level), _entries(level)
    least, lowest = LEAST, float(TABLE[0])

    @called_function
    def begin(x: Any, n_vectors: Any, address: Any) -> Any:
        high, low = simd.load_f32x16(x), simd.subtract(simd.splat(types.float32(0)), simd.load_f32x16(x))
        for vector in range(1, n_vectors):
            value = simd.load_f32x16(x + 64 * vector)
            high = simd.maximum(value, high)
            low = simd.maximum(simd.subtract(simd.splat(types.float32(0)), value), low)
        highest, deepest = simd.max_lanes(high), simd.max_lanes(low)
        top = highest if highest > deepest else -deepest
        inverse = types.float32(0)
        if max(highest, deepest) > types.float32(least):
            inverse = types.float32(lowest) / top
        best_factor, best_scale, best_gain = inverse, types.float32(0), types.float32(-1)
        for index in range(hidden(len(STRETCHES))):
            factor = inverse * types.float32(STRETCHES[index])
            products = simd.splat(types.float32(0))
            squares = simd.splat(types.float32(0))
            for vector in range(n_vectors):
                value = simd.load_f32x16(x + 64 * vector)
                entry = entries(simd.multiply(value, simd.splat(factor)))
                products = simd.add(simd.multiply(value, entry), products)
                squares = simd.add(simd.multiply(entry, entry), squares)
            dot = simd.sum_lanes(products)
            scale = dot / simd.sum_lanes(squares)
            gain = dot * scale
            if gain > best_gain:
                best_factor, best_scale, best_gain = factor, scale, gain
        store_half(address, best_scale + nan_unless_finite(x, n_vectors))
        return best_factor

    return begin


@inline_function
def nan_unless_finite(x: Any, n_vectors: Any) -> Any:
    """Return 0 for a group of finite numbers, and NaN otherwise."""
    nothing = simd.splat(types.float32(0))
    for vector in range(n_vectors):
        value = simd.load_f32x16(x + 64 * vector)
        nothing = simd.add(simd.multiply(value, simd.splat(types.float32(0))), nothing)
    return simd.sum_lanes(nothing)


def _store_half(level: str) -> Any:
    @intrinsic
    def store_half(typingctx: Any, address: Any, value: Any) -> Any:
        """Write a float as float16 and return the rounded value."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, value = args
            if level == "portable":
                halves = simd.emit_f32_to_f16(builder, level, simd.emit_splat(builder, value))
                simd.emit_store(builder, address, builder.extract_element(halves, simd.I32(0)), 2)
                return builder.extract_element(simd.emit_f16_to_f32(builder, level, halves), simd.I32(0))
            half = builder.fptrunc(value, simd.F16)
            simd.emit_store(builder, address, half, 2)
            return builder.fpext(half, simd.F32)

        return types.float32(types.int64, types.float32), codegen

    return store_half


def _write_halves(level: str, stride: int) -> Any:
    @intrinsic
    def write_halves(typingctx: Any, address: Any, vector: Any) -> Any:
        """Write 16 floats as float16, `stride` elements apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, vector = args
            _emit_store_apart(builder, address, simd.emit_f32_to_f16(builder, level, vector), 2, stride)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return write_halves


def write_bytes(spacing: int) -> Any:
    """Return a function that writes 16 floats as int8, `spacing` bytes apart.

    The floats are rounded to nearest even and clamped to -127..127. NaN becomes 0.
    """

    @intrinsic
    def write(typingctx: Any, address: Any, vector: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _emit_store_apart(builder, args[0], _emit_bytes(builder, args[1]), 1, spacing)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return write


def _write_quads(level: str, stride: int) -> Any:
    @intrinsic
    def write(typingctx: Any, address: Any, vector: Any) -> Any:
        """Write 16 floats as int8, rounded as by `write_bytes`, in groups of 4 that are 4 * `stride` bytes apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            quads = builder.bitcast(_emit_bytes(builder, args[1]), ir.VectorType(simd.I32, simd.LANES // QUAD))
            _emit_store_apart(builder, args[0], quads, QUAD, stride)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return write


def _emit_bytes(builder: Any, vector: Any) -> Any:
    # Values beyond 127 occur with subnormal scales, because rounding to float16 may reduce a scale by a third.
    for comparison, bound in ((">", -127.0), ("<", 127.0)):
        limit = simd.constant(simd.F32X16, bound)
        vector = builder.select(builder.fcmp_unordered(comparison, vector, limit), vector, limit)
    return builder.trunc(simd.emit_rounded(builder, vector), _I8X16)


def _write_nibbles(level: str, stride: int) -> Any:
    @intrinsic
    def write_nibbles(typingctx: Any, address: Any, vector: Any) -> Any:
        """Write the indices of the table's entries next to 16 floats.

        Two indices share a byte: neighbours if bytes are `stride` apart, and otherwise those that are 8 apart.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, vector = args
            indices = _emit_indices(builder, vector)
            low, high = (
                builder.shuffle_vector(indices, indices, ir.Constant(ir.VectorType(simd.I32, len(lanes)), lanes))
                for lanes in _SHARED_BYTES[stride > 1]
            )
            pairs = builder.or_(low, builder.shl(high, simd.constant(high.type, 4)))
            _emit_store_apart(builder, address, pairs, 1, stride)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return write_nibbles


def _entries(level: str) -> Any:
    @intrinsic
    def entries(typingctx: Any, vector: Any) -> Any:
        """Return the table's entries next to 16 floats, as floats."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = emit_lookup(builder, level, ir.Constant(_I8X16, TABLE.tolist()), _emit_indices(builder, args[0]))
            return builder.sitofp(builder.sext(found, simd.I32X16), simd.F32X16)

        return simd.f32x16(simd.f32x16), codegen

    return entries


def _emit_indices(builder: Any, vector: Any) -> Any:
    """Emit the indices <16 x i8> of the table's entries next to 16 floats. The index of NaN is 0."""
    indices = simd.constant(simd.I32X16, 0)
    for bound in BOUNDS:
        above = builder.fcmp_ordered(">", vector, simd.constant(simd.F32X16, bound))
        indices = builder.add(indices, builder.zext(above, simd.I32X16))
    return builder.trunc(indices, _I8X16)


def _emit_store_apart(builder: Any, address: Any, vector: Any, element_bytes: int, stride: int) -> None:
    """Store the elements of a vector, `stride` elements apart."""
    if stride == 1:
        simd.emit_store(builder, address, vector)
        return
    for lane in range(vector.type.count):
        at = simd.emit_offset(builder, address, element_bytes * stride * lane)
        simd.emit_store(builder, at, builder.extract_element(vector, simd.I32(lane)))
