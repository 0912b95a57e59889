"""Tests that instruction levels agree on fused multiply-adds, f16 conversions, exp and the integer dot product."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import store_i32
from tests.support.kernels.runs import LEVELS_HERE

ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)

Loop = Callable[[int, int, int], None]


@cache
def halves_to_floats(level: str) -> Loop:
    load = simd.Operations(level).load_f16x16

    @numba.njit("void(int64, int64, int64)")
    def run(source: Any, target: Any, count: Any) -> None:
        for start in range(0, count, 16):
            simd.store_f32x16(target + 4 * start, load(source + 2 * start))

    return run  # type: ignore[no-any-return]


@cache
def floats_to_halves(level: str) -> Loop:
    @intrinsic
    def convert(typingctx: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            floats = simd.emit_load(builder, args[0], simd.F32X16, 4)
            simd.emit_store(builder, args[1], simd.emit_f32_to_f16(builder, level, floats), 2)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @numba.njit("void(int64, int64, int64)")
    def run(source: Any, target: Any, count: Any) -> None:
        for start in range(0, count, 16):
            convert(source + 4 * start, target + 2 * start)

    return run  # type: ignore[no-any-return]


@cache
def exponentials(level: str) -> Loop:
    exp = simd.Operations(level).exp

    @numba.njit("void(int64, int64, int64)")
    def run(source: Any, target: Any, count: Any) -> None:
        for start in range(0, count, 16):
            simd.store_f32x16(target + 4 * start, exp(simd.load_f32x16(source + 4 * start)))

    return run  # type: ignore[no-any-return]


@cache
def multiply_adds(level: str) -> Callable[[int, int, int, int, int], None]:
    fma = simd.Operations(level).fma

    @numba.njit("void(int64, int64, int64, int64, int64)")
    def run(a: Any, b: Any, c: Any, target: Any, count: Any) -> None:
        for at in range(0, 4 * count, 64):
            found = fma(simd.load_f32x16(a + at), simd.load_f32x16(b + at), simd.load_f32x16(c + at))
            simd.store_f32x16(target + at, found)

    return run  # type: ignore[no-any-return]


def rounded_once(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Return the float32 nearest to a * b + c, computed with fractions. Ties go to the even one."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not exact:
        return a * b + c  # the sign of a zero
    near = np.float32(float(exact))
    if not np.isfinite(near):
        return near
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    finite = [candidate for candidate in candidates if np.isfinite(candidate)]
    best: np.float32 = min(finite, key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1))
    return np.float32(np.copysign(best, 1 if exact > 0 else -1))


def float32(values: Any) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def hard_sums() -> list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]]:
    """Return (a, b, c) whose sums a * b + c are hard to round: close to the middle between two floats, or subnormal."""
    random = np.random.default_rng(0)
    n = 4096
    ordinary = [float32(random.standard_normal(n)) for _ in range(3)]
    c = float32(np.ldexp(random.uniform(1, 2, n), random.integers(-100, 100, n)))
    sign = random.choice([-1, 1], n)
    # The product is half a unit in the last place of c, exactly or up to a factor of 1 - 2^-46 or 1 + 2^-22.
    half = [np.spacing(c) / 2 * sign] * 3
    first = np.array([1 + 2.0**-23, 1, 1 + 2.0**-23])[:, None]
    second = np.array([1 - 2.0**-23, 1, 1 + 2.0**-23])[:, None]
    middles = [
        float32(np.ravel(one)) for one in (half * first, np.broadcast_to(second, (3, n)), np.broadcast_to(c, (3, n)))
    ]
    tiny = float32(np.ldexp(random.uniform(-1, 1, n), random.integers(-150, -124, n)))
    small = float32(np.ldexp(random.uniform(-1, 1, n), random.integers(-90, -60, n)))
    subnormal = [small, float32(np.ldexp(random.uniform(-1, 1, n), random.integers(-90, -50, n))), tiny]
    # Subnormal numbers whose last bit is 1, plus almost half a unit in the last place. Each fills a vector, because one
    # doubtful sum is enough to compute its whole vector again.
    odd = float32([2.0**-127 + 2.0**-149, 2.0**-126 - 2.0**-149, 3 * 2.0**-149, 2.0**-149])
    edges = [float32([2.0**-75 * (1 + 2.0**-23)] * 64), float32([2.0**-75 * (1 - 2.0**-23)] * 64), np.repeat(odd, 16)]
    anything = [random.integers(0, 2**32, n, np.uint32).view(np.float32) for _ in range(3)]
    return [tuple(map(np.ascontiguousarray, one)) for one in (ordinary, middles, subnormal, edges, anything)]  # type: ignore[misc]


@pytest.mark.night
@EVERY_LEVEL
def test_multiply_adds_round_once(level: str) -> None:
    for a, b, c in hard_sums():
        found = np.empty_like(a)
        multiply_adds(level)(a.ctypes.data, b.ctypes.data, c.ctypes.data, found.ctypes.data, len(a))
        with np.errstate(all="ignore"):
            expected = [
                rounded_once(*three) if np.isfinite(three).all() else three[0] * three[1] + three[2]
                for three in zip(a, b, c, strict=True)
            ]
        assert_same_bits(found, float32(expected))


@pytest.mark.push
@EVERY_LEVEL
def test_multiply_adds_of_infinities(level: str) -> None:
    special = float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, 3e38, -3e38])
    a, b, c = (np.ascontiguousarray(one.ravel()) for one in np.meshgrid(special, special, special))
    found = np.empty_like(a)
    multiply_adds(level)(a.ctypes.data, b.ctypes.data, c.ctypes.data, found.ctypes.data, len(a))
    with np.errstate(all="ignore"):
        expected = (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)
    assert_same_bits(found, expected)


def convert_to_floats(level: str, halves: NDArray[np.float16]) -> NDArray[np.float32]:
    floats = np.empty(len(halves), np.float32)
    halves_to_floats(level)(halves.ctypes.data, floats.ctypes.data, len(halves))
    return floats


def convert_to_halves(level: str, floats: NDArray[np.float32]) -> NDArray[np.float16]:
    halves = np.empty(len(floats), np.float16)
    floats_to_halves(level)(floats.ctypes.data, halves.ctypes.data, len(floats))
    return halves


def assert_same_bits(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Assert that the bits are equal, treating all NaNs as the same."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    word = {2: np.uint16, 4: np.uint32}[expected.dtype.itemsize]
    np.testing.assert_array_equal(actual[~nan].view(word), expected[~nan].view(word))


@pytest.mark.push
@EVERY_LEVEL
def test_every_half_becomes_the_float_it_is(level: str) -> None:
    with np.errstate(invalid="ignore"):  # on Arm, NumPy warns about signaling NaNs
        expected = ALL_HALVES.astype(np.float32)
    assert_same_bits(convert_to_floats(level, ALL_HALVES), expected)


@pytest.mark.push
@EVERY_LEVEL
def test_floats_are_rounded_to_the_nearest_half_and_ties_to_even(level: str) -> None:
    """Covers every half, the midpoint between it and the next half, and the floats on both sides of each."""
    halves = ALL_HALVES[np.isfinite(ALL_HALVES)].astype(np.float64)
    halves = np.unique(halves)
    midpoints = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    points = np.concatenate([halves.astype(np.float32), midpoints])
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e38, 1e-45, 2**-25], np.float32)
    anything = np.random.default_rng(0).integers(0, 2**32, 1 << 18, np.uint32).view(np.float32)
    floats = np.concatenate([*around, special, -special, anything])
    floats = floats[: len(floats) // 16 * 16].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = floats.astype(np.float16)
    assert_same_bits(convert_to_halves(level, floats), expected)


@pytest.mark.push
@EVERY_LEVEL
def test_exp_is_within_two_units_in_the_last_place(level: str) -> None:
    """Covers a million arguments in [-87, 0]. At most 0.94 was measured."""
    x = np.concatenate([np.linspace(-87, 0, 1 << 20), -np.logspace(-30, 1.9, 1 << 16)]).astype(np.float32)
    y = np.empty_like(x)
    exponentials(level)(x.ctypes.data, y.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(y - exact) / unit).max() <= 2
    assert y[x == 0].tolist() == [1.0]


@EVERY_LEVEL
def test_exp_of_anything_not_positive_is_a_number_or_nan(level: str) -> None:
    x = np.array([-87.0, -88, -1e4, -3e38, -np.inf, np.nan, -0.0, 0.0] * 2, np.float32)
    y = np.empty_like(x)
    exponentials(level)(x.ctypes.data, y.ctypes.data, len(x))
    smallest = y[0]
    assert smallest == pytest.approx(np.exp(-87.0), rel=1e-6)
    np.testing.assert_array_equal(y[:8], [smallest] * 5 + [np.nan, 1, 1])


def test_only_the_lanes_between_are_kept() -> None:
    @numba.njit("void(int64, int64, int64, int64)")
    def run(source: Any, target: Any, first: Any, end: Any) -> None:
        kept = simd.keep_between(simd.load_f32x16(source), first, end, types.float32(-1))
        simd.store_f32x16(target, kept)

    vector, kept = np.arange(16, dtype=np.float32), np.empty(16, np.float32)
    for first in (-140, -1, 0, 1, 7, 15, 16):
        for end in (first, first + 1, first + 8, 16, 40):
            run(vector.ctypes.data, kept.ctypes.data, first, max(first, end))
            assert kept.tolist() == [lane if first <= lane < end else -1 for lane in range(16)]


def test_a_fold_adds_halves_in_a_fixed_order() -> None:
    @numba.njit("void(int64, int64)")
    def run(source: Any, target: Any) -> None:
        simd.store_f32x16(target, simd.splat(simd.sum_lanes(simd.load_f32x16(source))))

    vector = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    total = np.empty(16, np.float32)
    run(vector.ctypes.data, total.ctypes.data)
    folded = vector
    while len(folded) > 1:
        folded = folded[: len(folded) // 2] + folded[len(folded) // 2 :]
    assert total.tolist() == [folded[0]] * 16


def test_a_bfloat16_is_the_upper_half_of_a_float() -> None:
    @intrinsic
    def convert(typingctx: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bits = simd.emit_load(builder, args[0], simd.I16X16, 2)
            simd.emit_store(builder, args[1], simd.emit_bf16_to_f32(builder, bits), 4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @numba.njit("void(int64, int64)")
    def run(source: Any, target: Any) -> None:
        convert(source, target)

    bits = np.random.default_rng(0).integers(0, 65536, 16).astype(np.uint16)
    floats = np.empty(16, np.uint32)
    run(bits.ctypes.data, floats.ctypes.data)
    np.testing.assert_array_equal(floats, bits.astype(np.uint32) << 16)


def test_a_store_writes_no_more_than_its_width() -> None:
    @numba.njit("void(int64, int64)")
    def run(target: Any, value: Any) -> None:
        store_i32(target, value)

    words = np.zeros(4, np.int32)
    run(words.ctypes.data + 4, -7)
    assert words.tolist() == [0, -7, 0, 0]
