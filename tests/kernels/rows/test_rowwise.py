"""Tests of the elementwise row kernels against their NumPy twins, at every level, with odd widths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.lowering import float_word
from llmrun.backends.cpu.weights import reserve
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, round_up
from llmrun.kernels.rows.rowwise import CAP_CHUNK
from llmrun.model.plan.elementary import sigmoid_reference, soft_cap_reference
from llmrun.model.plan.ops.activations import (
    Activation,
    GatedWords,
    XieluCurve,
    XieluWords,
    gated_reference,
    xielu_reference,
)
from llmrun.model.plan.ops.embedding import EmbedWords
from llmrun.model.plan.ops.rows import AddWords, ClampWords, SoftCapWords
from llmrun.model.plan.twin import dequantized
from scripts.kernel_list import FLOAT_TYPES
from tests.support.backends.filled_weights import fill
from tests.support.kernels.runs import (
    LEVELS_HERE,
    WEIGHT_TYPES,
    padded_rows,
    random_matrix,
    run_kernel,
    ulps,
)
from tests.support.kernels.runs import width as width_of

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
ROWS = (1, 2, 3, 7, 8, 9, 17)


# --- activations ------------------------------------------------------------------------------------------------------


def run_gated(
    gate: NDArray[np.float32],
    up: NDArray[np.float32],
    level: str,
    threads: int,
    activation: Activation = Activation.SILU,
) -> NDArray[np.float32]:
    gates, ups = padded_rows(gate), padded_rows(up)
    y = np.full_like(gates, np.nan)
    up_stride = ups.strides[0] if len(up) > 1 else 0
    words = GatedWords(
        gate=address_of(gates),
        gate_stride=gates.strides[0],
        up=address_of(ups),
        up_stride=up_stride,
        out=address_of(y),
        out_stride=y.strides[0],
        width=gate.shape[1],
    )
    name = KernelName.of("rows.rowwise", "gated", activation=activation.value)
    run_kernel(name, words, {records.STEP_ROWS: len(gate)}, level=level, threads=threads)
    assert not y[:, gate.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : gate.shape[1]]


def gelu_erf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    halves = [0.5 * math.erfc(-number / math.sqrt(2)) for number in x.ravel().tolist()]
    exact: NDArray[np.float64] = x * np.array(halves).reshape(x.shape)
    return exact


# The activations that are computed without a sigmoid, in float64.
EXACT: dict[Activation, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    Activation.NONE: lambda x: x,
    Activation.TANH: np.tanh,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.RELU_SQUARED: lambda x: np.maximum(x, 0) ** 2,
    Activation.GELU_ERF: gelu_erf,
}


def exponent_of(x: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    """Return the argument of the activation's sigmoid."""
    if activation is Activation.GELU:
        argument: NDArray[np.float64] = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        return argument
    if activation in EXACT:  # they have no sigmoid
        return np.zeros_like(x)
    if activation is Activation.GELU_QUICK:
        return 1.702 * x
    return 1.702 * np.minimum(x, 7) if activation is Activation.CLAMPED_SILU else x


def exact_gated(gate: NDArray[np.float32], up: NDArray[np.float32], activation: Activation) -> NDArray[np.float64]:
    """Compute the gated product in float64, with formulas that do not cancel near 0."""
    x, y = gate.astype(np.float64), up.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-exponent_of(x, activation)))
    if activation is Activation.CLAMPED_SILU:
        x, y = np.minimum(x, 7), np.clip(y, -7, 7) + 1
    if activation in EXACT:
        return EXACT[activation](x) * y
    exact: NDArray[np.float64] = (sigmoid if activation is Activation.SIGMOID else x * sigmoid) * y
    return exact


@EVERY_LEVEL
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", ROWS)
def test_gated_is_near_its_twin(level: str, rows: int, activation: Activation) -> None:
    """Allow 5 units in the last place: exp is within 2, and the fraction e / (1 + e) of its error reaches the result.

    For activations other than silu, the allowance is relative to gate times up, because gelu's twin cancels below 0.
    """
    random = np.random.default_rng(rows)
    gate = np.clip(40 * random.standard_normal((rows, 101)), -87, 87).astype(np.float32)
    up = (9 * random.standard_normal((rows, 101))).astype(np.float32)
    actual = run_gated(gate, up, level, 1 + rows % 4, activation)
    expected = gated_reference(gate, up, activation)
    if activation is Activation.SILU:
        assert ulps(actual, expected) <= 5
    size = np.maximum(np.abs(expected), np.abs(gate) * np.maximum(np.abs(up), 1))
    assert (np.abs(actual - expected) / np.spacing(size)).max() <= 5


@EVERY_LEVEL
@pytest.mark.parametrize("activation", Activation)
def test_an_activation_is_near_float64s(level: str, activation: Activation) -> None:
    """Allow 5 units in the last place where the argument of exp is small.

    Elsewhere exp amplifies the rounding of its argument in proportion to its size, and gelu rounds the argument six
    times. The polynomial of the normal distribution adds 2 units.
    """
    gate = np.linspace(-9, 90, 1 << 18).astype(np.float32).reshape(16, -1)
    gate[0, :9] = [0, 1e-30, -1e-30, 1e-3, -1e-3, 1e-10, -1e-10, 0.5, -0.5]
    up = np.ones_like(gate)
    exact = exact_gated(gate, up, activation)
    units = np.abs(run_gated(gate, up, level, 1, activation) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    argument = np.minimum(exponent_of(gate.astype(np.float64), activation), 0)
    if activation is Activation.GELU_ERF:  # the exponent of its normal distribution
        argument = np.minimum(gate, 0).astype(np.float64) ** 2 / 2
    roundings = {
        Activation.GELU: 6,
        Activation.GELU_ERF: 2,
        Activation.GELU_QUICK: 2,
        Activation.CLAMPED_SILU: 2,
    }.get(activation, 0)
    allowed = 7 if activation is Activation.GELU_ERF else 5
    assert (units - roundings / 2 * np.abs(argument)).max() <= allowed


@EVERY_LEVEL
@pytest.mark.parametrize("activation", [one for one in Activation if one is not Activation.CLAMPED_SILU])
def test_an_activation_alone_has_the_same_ones_for_all_rows(level: str, activation: Activation) -> None:
    gate = (4 * np.random.default_rng(0).standard_normal((5, 75))).astype(np.float32)
    alone = run_gated(gate, np.ones((1, 75), np.float32), level, 2, activation)
    np.testing.assert_array_equal(alone, run_gated(gate, np.ones_like(gate), level, 1, activation))


@EVERY_LEVEL
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU, Activation.GELU_ERF, Activation.GELU_QUICK])
def test_activations_at_their_ends(level: str, activation: Activation) -> None:
    gate = np.array([[0.0, -0.0, 200, -200, 3e38, np.inf, np.nan]], np.float32)
    actual = run_gated(gate, np.ones_like(gate), level, 1, activation)[0]
    np.testing.assert_array_equal(actual[[0, 1, 2, 4, 5, 6]], np.array([0, 0, 200, 3e38, np.inf, np.nan], np.float32))
    assert -1e-30 < actual[3] <= 0


@EVERY_LEVEL
def test_sigmoid_of_extreme_values(level: str) -> None:
    gate = np.array([[0.0, -0.0, 200, -200, np.inf, -np.inf, np.nan]], np.float32)
    actual = run_gated(gate, np.full_like(gate, 3), level, 1, Activation.SIGMOID)[0]
    np.testing.assert_array_equal(actual[[0, 1, 2, 4, 6]], np.array([1.5, 1.5, 3, 3, np.nan], np.float32))
    assert 0 <= actual[3] < 1e-30
    assert 0 <= actual[5] < 1e-30


@EVERY_LEVEL
@pytest.mark.parametrize(
    ("activation", "three", "huge"), [(Activation.RELU, 3, 1e30), (Activation.RELU_SQUARED, 9, np.inf)]
)
def test_relu_of_extreme_values(level: str, activation: Activation, three: float, huge: float) -> None:
    """NaN must not disappear, whatever its sign: processors create NaN with either sign."""
    gate = np.array([[0.0, -0.0, 3, -3, 1e30, -np.inf, np.nan, -np.nan]], np.float32)
    actual = run_gated(gate, np.ones_like(gate), level, 1, activation)[0]
    expected = np.array([0, 0, three, 0, huge, 0, np.nan, np.nan], np.float32)
    np.testing.assert_array_equal(actual, expected)


@EVERY_LEVEL
def test_the_clamped_activation_is_clamped(level: str) -> None:
    gate = np.array([[7, 8, np.inf, 1, 1, 1, 1, np.nan, 1]], np.float32)
    up = np.array([[1, 1, 1, 7, 70, -7, -np.inf, 1, np.nan]], np.float32)
    actual = run_gated(gate, up, level, 1, Activation.CLAMPED_SILU)[0]
    assert actual[0] == actual[1] == actual[2] == pytest.approx(14, rel=1e-4)
    assert actual[3] == actual[4] > 0
    assert actual[5] == actual[6] < 0
    assert np.isnan(actual[7:]).all()


CURVE = XieluCurve(positive=1.2, negative=1.7, slope=0.5, least=-1e-6)


def run_xielu(x: NDArray[np.float32], level: str, threads: int, curve: XieluCurve) -> NDArray[np.float32]:
    xs = padded_rows(x)
    y = np.full_like(xs, np.nan)
    words = XieluWords(
        x=address_of(xs),
        x_stride=xs.strides[0],
        out=address_of(y),
        out_stride=y.strides[0],
        width=x.shape[1],
        positive=float_word(curve.positive),
        negative=float_word(curve.negative),
        slope=float_word(curve.slope),
        least=float_word(curve.least),
    )
    run_kernel(KernelName.of("rows.rowwise", "xielu"), words, {records.STEP_ROWS: len(x)}, level=level, threads=threads)
    assert not y[:, x.shape[1] :].any(), "the padding of a row must stay zero"
    return y[:, : x.shape[1]]


@EVERY_LEVEL
@pytest.mark.parametrize("least", [-1e-6, -0.7, 0.3])
def test_xielu_is_near_float64s(level: str, least: float) -> None:
    """Allow 5 units in the last place of the largest term, because the terms cancel near 0."""
    curve = replace(CURVE, least=least)
    x = np.concatenate([np.linspace(-30, 30, 6000), np.geomspace(1e-12, 1, 500), -np.geomspace(1e-12, 1, 500)])
    x = x.astype(np.float32).reshape(7, -1)
    actual, expected = run_xielu(x, level, 3, curve), xielu_reference(x, curve)
    wide, least = x.astype(np.float64), float(np.float32(curve.least))
    below = float(np.float32(curve.negative)) * (np.expm1(np.minimum(wide, least)) - wide)
    above = float(np.float32(curve.positive)) * np.square(wide)
    exact = np.where(wide < 0, below, above) + float(np.float32(curve.slope)) * wide
    unit = np.spacing(np.maximum(np.abs(x), np.where(x < 0, abs(least), np.square(x))).astype(np.float32))
    for found in (actual, expected):
        assert (np.abs(found - exact) / unit).max() <= 5


@EVERY_LEVEL
def test_xielu_of_extreme_values(level: str) -> None:
    x = np.array([[0.0, -0.0, np.inf, np.nan, -np.nan, -100]], np.float32)
    actual = run_xielu(x, level, 1, CURVE)[0]
    np.testing.assert_array_equal(actual[:5], np.array([0, 0, np.inf, np.nan, np.nan], np.float32))
    assert actual[5] == pytest.approx(1.7 * 99 - 50)


@EVERY_LEVEL
@pytest.mark.parametrize(("rows", "width"), [(1, 75), (3, 16), (9, 101)])
def test_clamped_numbers_are_those_of_numpy(level: str, rows: int, width: int) -> None:
    x = (3 * np.random.default_rng(rows).standard_normal((rows, width))).astype(np.float32)
    x[0, :5] = [np.nan, np.inf, -np.inf, -0.7, 1.3]
    xs = padded_rows(x)
    y = np.full_like(xs, np.nan)
    words = ClampWords(
        x=address_of(xs),
        x_stride=xs.strides[0],
        out=address_of(y),
        out_stride=y.strides[0],
        width=width,
        least=float_word(-0.7),
        most=float_word(1.3),
    )
    run_kernel(KernelName.of("rows.rowwise", "clamp"), words, {records.STEP_ROWS: rows}, level=level, threads=2)
    np.testing.assert_array_equal(y[:, :width], np.clip(x, np.float32(-0.7), np.float32(1.3)))
    assert not y[:, width:].any(), "the padding of a row must stay zero"


# --- sums -------------------------------------------------------------------------------------------------------------


def run_add(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    level: str,
    *,
    factor: float = 1.0,
    gate: NDArray[np.float32] | None = None,
    plain_at: int | None = None,
) -> NDArray[np.float32]:
    """Run the add kernel in place on x, or into another buffer if y is one row shared by all rows of x.

    If there is a `plain_at`, this feature of the gate is added to the factor, without a sigmoid.
    """
    rows, width = x.shape
    xs, ys, gates = padded_rows(x), padded_rows(y), padded_rows(np.ones((1, 1), np.float32) if gate is None else gate)
    same_for_all = len(y) == 1 < rows
    total = np.full_like(xs, np.nan) if same_for_all else xs
    words = AddWords(
        out=address_of(total),
        out_stride=total.strides[0],
        x=address_of(xs),
        x_stride=xs.strides[0],
        y=address_of(ys),
        y_stride=0 if same_for_all else ys.strides[0],
        width=width,
        factor=float_word(factor),
        gate=0 if gate is None else address_of(gates),
        gate_stride=gates.strides[0],
        gate_at=4 * (plain_at or 0),
        is_plain=int(plain_at is not None),
    )
    run_kernel(
        KernelName.of("rows.rowwise", "add"), words, {records.STEP_ROWS: rows}, level=level, threads=1 + rows % 3
    )
    assert not total[:, width:].any(), "the padding of a row must stay zero"
    return total[:, :width]


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_those_of_numpy(level: str, rows: int) -> None:
    """The results are bit-identical, because every level rounds each operation."""
    random = np.random.default_rng(rows)
    for width in (1, 16, 75):
        x, y = (random.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
        np.testing.assert_array_equal(run_add(x, y, level), x + y)
        np.testing.assert_array_equal(run_add(x, y, level, factor=0.22), x + np.float32(0.22) * y)
        np.testing.assert_array_equal(run_add(x, y[:1], level), x + y[:1])


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_a_gated_sum_is_near_its_twin(level: str, rows: int) -> None:
    """Each row has its own gate. A gate of 100 gives a factor of 1."""
    random = np.random.default_rng(rows)
    x, y = (random.standard_normal((rows, 75)).astype(np.float32) for _ in range(2))
    gate = (3 * random.standard_normal((rows, 1))).astype(np.float32)
    gate[-1] = 100
    actual, expected = run_add(x, y, level, gate=gate), x + sigmoid_reference(gate) * y
    np.testing.assert_array_equal(actual[-1], x[-1] + y[-1])
    assert (np.abs(actual - expected) / np.spacing(np.abs(x) + np.abs(y))).max() <= 4


@EVERY_LEVEL
@pytest.mark.parametrize("rows", ROWS)
def test_a_weighted_sum_takes_its_factor_from_a_row(level: str, rows: int) -> None:
    """The results are bit-identical, because every level rounds each operation."""
    random = np.random.default_rng(rows)
    x, y = (random.standard_normal((rows, 75)).astype(np.float32) for _ in range(2))
    factors = random.standard_normal((rows, 5)).astype(np.float32)
    for at in (0, 4):
        actual = run_add(x, y, level, factor=1.0, gate=factors, plain_at=at)
        np.testing.assert_array_equal(actual, x + (np.float32(1) + factors[:, at : at + 1]) * y)


# --- the cap on logits ------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("width", [1, 37, CAP_CHUNK, 2 * CAP_CHUNK + 5])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_logits_are_capped(level: str, rows: int, width: int) -> None:
    """Each row and chunk is capped exactly once, although threads take chunks dynamically."""
    logits = (40 * np.random.default_rng(width).standard_normal((rows, width))).astype(np.float32)
    padded = padded_rows(logits) if rows else np.zeros((1, round_up(width, 16)), np.float32)
    words = SoftCapWords(stride=padded.strides[0], width=width, cap=float_word(30.0))
    step = {records.STEP_ROWS: rows, records.STEP_LOGITS: address_of(padded)}
    run_kernel(KernelName.of("rows.rowwise", "soft_cap"), words, step, level=level, threads=3)
    assert rows == 0 or ulps(padded[:, :width], soft_cap_reference(logits, 30.0)) <= 4


# --- embedding --------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("scale", [1.0, 33.9411])
@pytest.mark.parametrize("indices", [records.STEP_TOKENS, records.STEP_POSITIONS])
def test_embedded_rows_are_the_dequantized_ones_scaled(level: str, kind: str, scale: float, indices: int) -> None:
    """The results are bit-identical, because both round in the same places."""
    columns = 37 if kind in FLOAT_TYPES else width_of(kind, 96)
    table = random_matrix(kind, 50, columns)
    tokens = np.array([49, 0, 7, 7, 31, 48, 1], np.int32)
    y = np.zeros((len(tokens), round_up(columns, 16)), np.float32)
    packed = reserve([table])[table.name]
    fill({table.name: packed}, 1)
    words = EmbedWords(
        table=packed.address,
        group_bytes=packed.layout.group_bytes,
        width=columns,
        out=address_of(y),
        out_stride=y.strides[0],
        scale=float_word(scale),
        indices=indices,
    )
    step = {records.STEP_ROWS: len(tokens), indices: address_of(tokens)}
    run_kernel(KernelName.of("linear.embed", "embed", weight=table.packed), words, step, level=level, threads=3)
    np.testing.assert_array_equal(y[:, :columns], dequantized(table)[tokens] * np.float32(scale))
    assert not y[:, columns:].any()
