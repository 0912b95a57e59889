"""Functions that store keys and values in each type of KV cache (kv_blocks.py)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code import simd
from llmrun.kernels.compiler import inline_function
from llmrun.layouts.kv_blocks import BLOCK, GROUP, HeadLayout, n_groups


def storing(level: str, layout: HeadLayout) -> tuple[Any, Any]:
    """Return (store_key, store_value) for one head.

    Both functions take the address of the float32 vector, the address of the head's part of a block, and the slot in
    that block.
    """
    return _storing_integers(level, layout) if layout.has_scales else _storing_halves(level, layout)


def _storing_halves(level: str, layout: HeadLayout) -> tuple[Any, Any]:
    head_size, value_size, values_at = layout.head_size, layout.value_size, layout.values
    store_key_halves, store_value_halves = _store_halves(level, BLOCK), _store_halves(level, 1)

    @inline_function
    def store_key(key: Any, block: Any, slot: Any) -> Any:
        for feature in range(0, head_size, simd.LANES):
            store_key_halves(block + 2 * (BLOCK * feature + slot), simd.load_f32x16(key + 4 * feature))

    @inline_function
    def store_value(value: Any, block: Any, slot: Any) -> Any:
        for feature in range(0, value_size, simd.LANES):
            at = block + values_at + 2 * (value_size * slot + feature)
            store_value_halves(at, simd.load_f32x16(value + 4 * feature))

    return store_key, store_value


def _storing_integers(level: str, layout: HeadLayout) -> tuple[Any, Any]:
    head_size, value_size = layout.head_size, layout.value_size
    key_scales, values_at, value_scales = layout.key_scales, layout.values, layout.value_scales
    store_half = _store_half(level)
    store_key_integers, store_value_integers = _store_integers(BLOCK), _store_integers(1)
    key_groups, value_groups = n_groups(head_size), n_groups(value_size)

    @inline_function
    def store_scale(x: Any, n_vectors: Any, address: Any) -> Any:
        """Store the scale of a group and return its inverse. A NaN or an infinity in the group makes the scale NaN."""
        largest = simd.splat(types.float32(0))
        nothing = simd.splat(types.float32(0))
        for vector in range(n_vectors):
            value = simd.load_f32x16(x + 64 * vector)
            largest = simd.maximum(simd.absolute(value), largest)
            nothing = simd.add(simd.multiply(value, simd.splat(types.float32(0))), nothing)
        scale = store_half(address, simd.max_lanes(largest) / types.float32(127) + simd.sum_lanes(nothing))
        return types.float32(1) / scale if scale > types.float32(0) else types.float32(0)

    @inline_function
    def store_key(key: Any, block: Any, slot: Any) -> Any:
        for group in range(key_groups):
            n_vectors = min(GROUP, head_size - GROUP * group) // simd.LANES
            inverse = store_scale(key + 4 * GROUP * group, n_vectors, block + key_scales + 2 * (BLOCK * group + slot))
            for vector in range(n_vectors):
                feature = GROUP * group + simd.LANES * vector
                value = simd.multiply(simd.load_f32x16(key + 4 * feature), simd.splat(inverse))
                store_key_integers(block + BLOCK * feature + slot, value)

    @inline_function
    def store_value(value: Any, block: Any, slot: Any) -> Any:
        for group in range(value_groups):
            n_vectors = min(GROUP, value_size - GROUP * group) // simd.LANES
            scale = block + value_scales + 2 * (BLOCK * group + slot)
            inverse = store_scale(value + 4 * GROUP * group, n_vectors, scale)
            for vector in range(n_vectors):
                feature = GROUP * group + simd.LANES * vector
                scaled = simd.multiply(simd.load_f32x16(value + 4 * feature), simd.splat(inverse))
                store_value_integers(block + values_at + value_size * slot + feature, scaled)

    return store_key, store_value


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


def _store_halves(level: str, stride: int) -> Any:
    @intrinsic
    def store_halves(typingctx: Any, address: Any, vector: Any) -> Any:
        """Write 16 floats as float16, `stride` elements apart."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, vector = args
            _emit_store_apart(builder, address, simd.emit_f32_to_f16(builder, level, vector), 2, stride)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return store_halves


def _store_integers(stride: int) -> Any:
    @intrinsic
    def store_integers(typingctx: Any, address: Any, vector: Any) -> Any:
        """Write 16 floats as int8, `stride` bytes apart.

        The floats are rounded to nearest even and clamped to -127..127. NaN becomes 0.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, vector = args
            # Values beyond 127 occur with subnormal scales, because rounding to float16 may reduce a scale by a third.
            for comparison, bound in ((">", -127.0), ("<", 127.0)):
                limit = simd.constant(simd.F32X16, bound)
                vector = builder.select(builder.fcmp_unordered(comparison, vector, limit), vector, limit)
            integers = builder.trunc(simd.emit_rounded(builder, vector), ir.VectorType(simd.I8, simd.LANES))
            _emit_store_apart(builder, address, integers, 1, stride)
            return context.get_dummy_value()

        return types.void(types.int64, simd.f32x16), codegen

    return store_integers


def _emit_store_apart(builder: Any, address: Any, vector: Any, element_bytes: int, stride: int) -> None:
    """Store the elements of a vector, `stride` elements apart."""
    if stride == 1:
        simd.emit_store(builder, address, vector)
        return
    for lane in range(simd.LANES):
        at = simd.emit_offset(builder, address, element_bytes * stride * lane)
        simd.emit_store(builder, at, builder.extract_element(vector, simd.I32(lane)))
