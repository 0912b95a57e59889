"""Tests of sigmoid, softplus and tanh against float64."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.kernels.code import curves, simd
from tests.support.kernels.runs import LEVELS_HERE

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
CURVES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "tanh": np.tanh,
}


@cache
def loop(name: str, level: str) -> Callable[[int, int, int], None]:
    curve = getattr(curves, name)(level)

    @numba.njit("void(int64, int64, int64)")
    def run(source: Any, target: Any, count: Any) -> None:
        for start in range(0, count, 16):
            simd.store_f32x16(target + 4 * start, curve(simd.load_f32x16(source + 4 * start)))

    return run  # type: ignore[no-any-return]


def values_of(name: str, level: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    y = np.empty_like(padded)
    loop(name, level)(padded.ctypes.data, y.ctypes.data, len(padded))
    return y[: len(x)]


@EVERY_LEVEL
@pytest.mark.parametrize(("name", "most"), [("sigmoid", 4), ("softplus", 4), ("tanh", 3)])
def test_a_curve_is_within_a_few_units_in_the_last_place(level: str, name: str, most: float) -> None:
    """Covers half a million arguments of both signs from 1e-30 to 87, and those around the point where tanh switches
    formulas.
    """
    spread = [np.linspace(0, 87, 1 << 18), np.logspace(-30, 1.9, 1 << 16), np.linspace(0.55, 0.7, 1 << 16)]
    x = np.concatenate([*spread, *(-part for part in spread)]).astype(np.float32)
    exact = CURVES[name](x.astype(np.float64))
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(values_of(name, level, x) - exact) / unit).max() <= most


@EVERY_LEVEL
def test_curves_at_their_ends(level: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, 200, 3e38, np.inf, -200, -3e38, -np.inf, np.nan], np.float32)
    near = np.array([0, 0, 1e-45, 1, 1, 1, -1, -1, -1, np.nan], np.float32)
    np.testing.assert_array_equal(values_of("tanh", level, x), near)
    sigmoids = values_of("sigmoid", level, x)
    np.testing.assert_array_equal(sigmoids[:6], [0.5, 0.5, 0.5, 1, 1, 1])
    assert (sigmoids[6:9] < 1e-37).all()
    assert np.isnan(sigmoids[9])


@EVERY_LEVEL
@pytest.mark.parametrize("name", CURVES)
def test_a_curve_never_falls(level: str, name: str) -> None:
    """Within the error bound, no step may fall by more than two units, even where tanh switches formulas."""
    spread = [np.linspace(-20, 20, 1 << 18), np.linspace(0.6249, 0.6251, 1 << 12)]
    x = np.unique(np.concatenate(spread).astype(np.float32))
    y = values_of(name, level, x)
    assert (np.diff(y) >= -2 * np.spacing(np.abs(y[1:]))).all()
