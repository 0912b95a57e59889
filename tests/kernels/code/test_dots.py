"""Tests that each instruction level's integer dot product is exact, also at the extremes of every packed type."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import dots, simd
from tests.support.kernels.runs import LEVELS_HERE

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
# One packed type for each distinct way of calling `emit_dots`.
FORMS = {(t.bits, t.is_signed, t.sub_blocks): kind for kind, t in PACKED_TYPES.items()}.values()
EVERY_TYPE = pytest.mark.parametrize("kind", FORMS)


@cache
def block_of_dots(level: str, kind: str) -> Callable[[int, int, int], None]:
    """Compile a kernel that multiplies 32 columns of 16 rows.

    It takes uint8 weights [8, 16, 4] and int8 activations [32], and adds to int32 sums [sub-blocks, 16].
    """
    packed = PACKED_TYPES[kind]

    @intrinsic
    def emit(typingctx: Any, weights: Any, activations: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def at(address: Any, n_bytes: int, llvm_type: Any) -> Any:
                return simd.emit_load(builder, simd.emit_offset(builder, address, n_bytes), llvm_type)

            vectors = [at(args[0], 64 * j, simd.I8X64) for j in range(8)]
            fours = [at(args[1], 4 * j, simd.I32) for j in range(8)]
            starts = [at(args[2], 64 * sub, simd.I32X16) for sub in range(packed.sub_blocks)]
            for sub, found in enumerate(dots.emit_dots(builder, level, packed, vectors, fours, starts)):
                simd.emit_store(builder, simd.emit_offset(builder, args[2], 64 * sub), found)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    @numba.njit("void(int64, int64, int64)")
    def run(weights: Any, activations: Any, sums: Any) -> None:
        emit(weights, activations, sums)

    return run  # type: ignore[no-any-return]


def check(level: str, kind: str, weights: NDArray[np.int64], activations: NDArray[np.int8]) -> None:
    """Compare the kernel with NumPy: weights int64[8, 16, 4], in the range of this level; activations int8[32]."""
    packed = PACKED_TYPES[kind]
    stored = weights.astype(np.uint8)  # signed weights wrap
    sums = np.arange(16 * packed.sub_blocks, dtype=np.int32).reshape(packed.sub_blocks, 16) - 8
    products = np.einsum("jrc,jc->jr", weights, activations.reshape(8, 4).astype(np.int64))
    expected = sums + products.reshape(packed.sub_blocks, -1, 16).sum(1)
    block_of_dots(level, kind)(stored.ctypes.data, activations.ctypes.data, sums.ctypes.data)
    np.testing.assert_array_equal(sums, expected)


def extremes(level: str, packed: PackedType) -> tuple[int, int]:
    if dots.takes_unsigned(level, packed):
        return 0, 255 if packed.is_signed else (1 << packed.bits) - 1
    return -128, 127


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("activation", [-127, 127])
def test_sums_are_exact_where_narrow_lanes_would_overflow(level: str, kind: str, activation: int) -> None:
    activations = np.full(32, activation, np.int8)
    for weight in extremes(level, PACKED_TYPES[kind]):
        check(level, kind, np.full((8, 16, 4), weight, np.int64), activations)


@pytest.mark.push
@EVERY_LEVEL
@EVERY_TYPE
def test_sums_of_anything_are_exact(level: str, kind: str) -> None:
    random = np.random.default_rng(0)
    low, high = extremes(level, PACKED_TYPES[kind])
    for _ in range(50):
        weights = random.integers(low, high + 1, (8, 16, 4))
        check(level, kind, weights, random.integers(-127, 128, 32).astype(np.int8))


@EVERY_LEVEL
@EVERY_TYPE
def test_a_bias_is_a_power_of_two(level: str, kind: str) -> None:
    """A power of two lets the kernel multiply the bias by a sum with a shift."""
    bias = dots.bias_of(level, PACKED_TYPES[kind])
    assert bias & (bias - 1) == 0


def test_paired_weights_are_eight_columns_of_each_output() -> None:
    """This is the order of weights in panels at levels that multiply pairs of rows."""

    @intrinsic
    def emit(typingctx: Any, weights: Any, paired: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors = [
                simd.emit_load(builder, simd.emit_offset(builder, args[0], 64 * j), simd.I8X64) for j in range(8)
            ]
            for j, vector in enumerate(dots.emit_paired(builder, vectors)):
                simd.emit_store(builder, simd.emit_offset(builder, args[1], 64 * j), vector)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @numba.njit("void(int64, int64)")
    def run(weights: Any, paired: Any) -> None:
        emit(weights, paired)

    by_output = np.random.default_rng(0).integers(0, 256, (16, 32)).astype(np.uint8)
    weights = np.ascontiguousarray(by_output.reshape(16, 8, 4).transpose(1, 0, 2))
    found = np.zeros((4, 16, 8), np.uint8)
    run(weights.ctypes.data, found.ctypes.data)
    np.testing.assert_array_equal(found.transpose(1, 0, 2).reshape(16, 32), by_output)
