"""Tests of the kernels of recurrent layers against their twins, in steps of any size and at every level."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.model.plan.elementary import sigmoid_reference, softplus_reference
from llmrun.model.plan.ops.convolution import causal_convolution_reference
from llmrun.model.plan.ops.recurrences import (
    decay_reference,
    delta_rule_reference,
    selective_scan_reference,
    ssd_reference,
)
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value
from tests.support.kernels.runs import LEVELS_HERE, matrix_of
from tests.support.kernels.sequence_runs import run_steps

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
ROWS, HEADS = 70, 4
STEPS = ([70], [1] * 70, [7] * 10, [33, 1, 20, 16])


def run_in_steps(
    build: Callable[[Plan, Value], Value], x: NDArray[np.float32], steps: list[int], level: str, threads: int = 1
) -> NDArray[np.float32]:
    """Return the value that `build` computes from x, float32[rows, width]. Row i enters as the embedding of token i."""
    plan = Plan()
    out = build(plan, plan.embed(matrix_of("f32", x, "rows")))
    plan.output(out, matrix_of("f32", np.eye(out.width, dtype=np.float32), "identity"))
    ends = np.cumsum(steps)
    tokens = [[(0, token) for token in range(end - count, end)] for end, count in zip(ends, steps, strict=True)]
    return run_steps(plan, tokens, level=level, threads=threads)[0]


def parameters() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (rate, bias). The decays are between 0.2 and 0.99."""
    random = np.random.default_rng(1)
    return -np.exp(random.uniform(-4, 0.7, HEADS)).astype(np.float32), random.standard_normal(HEADS).astype(np.float32)


def near(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert np.abs(actual - expected).max() <= 2e-6 * np.abs(expected).max()


@EVERY_LEVEL
@pytest.mark.parametrize(("key_size", "value_size", "shared"), [(16, 16, 1), (32, 96, 2), (128, 64, 1), (64, 128, 2)])
def test_the_delta_rule_is_near_its_twin(level: str, key_size: int, value_size: int, shared: int) -> None:
    random, (rate, bias) = np.random.default_rng(0), parameters()
    keys, values = 2 * key_size, HEADS * value_size
    x = random.standard_normal((ROWS, 2 * keys + values + 2 * HEADS)).astype(np.float32)
    ends = np.cumsum([keys, keys, values, HEADS])

    def build(plan: Plan, x: Value) -> Value:
        firsts = [0, *ends.tolist()]
        widths = [keys, keys, values, HEADS, HEADS]
        q, k, v, gate, beta = (plan.slice(x, at, width) for at, width in zip(firsts, widths, strict=True))
        q, k = plan.l2norm(q, key_size, 1e-6), plan.l2norm(k, key_size, 1e-6)
        return plan.delta_rule(q, k, v, gate, beta, rate=rate, bias=bias, key_heads=2, shared=shared)

    q, k, v, gate, beta = np.split(x, ends, axis=1)
    heads = np.arange(HEADS) // shared % 2
    q, k = (part.reshape(ROWS, 2, key_size) for part in (q, k))
    q, k = (part / np.sqrt(np.square(part).sum(-1, keepdims=True) + np.float32(1e-6)) for part in (q, k))
    decays, _ = decay_reference(gate, rate, bias)
    v = v.reshape(ROWS, HEADS, value_size)
    expected = delta_rule_reference(q[:, heads], k[:, heads], v, decays, sigmoid_reference(beta)).reshape(ROWS, -1)
    whole = run_in_steps(build, x, STEPS[0], level)
    near(whole, expected)
    for steps in STEPS[1:]:
        np.testing.assert_array_equal(run_in_steps(build, x, steps, level, threads=2), whole)


@EVERY_LEVEL
@pytest.mark.parametrize(("key_size", "value_size", "key_heads"), [(16, 32, 1), (128, 64, 2), (64, 16, 4)])
def test_mamba_2_is_near_its_twin(level: str, key_size: int, value_size: int, key_heads: int) -> None:
    random, (rate, bias) = np.random.default_rng(0), parameters()
    keys, values, skip = key_heads * key_size, HEADS * value_size, 1 + bias
    x = random.standard_normal((ROWS, 2 * keys + values + HEADS)).astype(np.float32)
    ends = np.cumsum([values, keys, keys])

    def build(plan: Plan, x: Value) -> Value:
        firsts = [0, *ends.tolist()]
        some, b, c, gate = (
            plan.slice(x, at, width) for at, width in zip(firsts, [values, keys, keys, HEADS], strict=True)
        )
        return plan.ssd(some, b, c, gate, rate=rate, bias=bias, skip=skip, key_heads=key_heads)

    some, b, c, gate = np.split(x, ends, axis=1)
    heads = np.arange(HEADS) // (HEADS // key_heads)
    b, c = (part.reshape(ROWS, key_heads, key_size)[:, heads] for part in (b, c))
    some = some.reshape(ROWS, HEADS, value_size)
    expected = ssd_reference(some, b, c, *decay_reference(gate, rate, bias)) + skip[:, None] * some
    whole = run_in_steps(build, x, STEPS[0], level)
    near(whole, expected.reshape(ROWS, -1))
    for steps in STEPS[1:]:
        np.testing.assert_array_equal(run_in_steps(build, x, steps, level, threads=2), whole)


@EVERY_LEVEL
@pytest.mark.parametrize(("key_size", "columns"), [(16, 16), (16, 144), (48, 64)])
def test_mamba_1_is_near_its_twin(level: str, key_size: int, columns: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 2 * columns + 2 * key_size)).astype(np.float32)
    rate = -np.exp(random.uniform(-4, 0.7, (columns, key_size))).astype(np.float32)
    bias, skip = (random.standard_normal(columns).astype(np.float32) for _ in range(2))

    def build(plan: Plan, x: Value) -> Value:
        firsts, widths = (
            [0, columns, columns + key_size, columns + 2 * key_size],
            [columns, key_size, key_size, columns],
        )
        some, b, c, gate = (plan.slice(x, at, width) for at, width in zip(firsts, widths, strict=True))
        return plan.selective_scan(some, b, c, gate, rate=rate, bias=bias, skip=skip)

    some, b, c, gate = np.split(x, np.cumsum([columns, key_size, key_size]), axis=1)
    expected = selective_scan_reference(some, b, c, softplus_reference(gate + bias), rate) + skip * some
    whole = run_in_steps(build, x, STEPS[0], level)
    near(whole, expected)
    for steps in STEPS[1:]:
        np.testing.assert_array_equal(run_in_steps(build, x, steps, level, threads=2), whole)


@EVERY_LEVEL
@pytest.mark.parametrize("taps", [2, 4, 16])
@pytest.mark.parametrize("widths", [(16,), (240, 48), (288, 16, 320)])
def test_a_causal_convolution_is_near_its_twin(level: str, taps: int, widths: tuple[int, ...]) -> None:
    """Some outputs begin in the middle of the features that a thread convolves at a time."""
    random, width = np.random.default_rng(0), sum(widths)
    x = random.standard_normal((ROWS, width)).astype(np.float32)
    weight = random.standard_normal((width, taps)).astype(np.float32)
    bias = random.standard_normal(width).astype(np.float32)

    def build(plan: Plan, x: Value) -> Value:
        first, *others = plan.causal_convolution(x, weight, bias, widths)
        for other in others:
            first = plan.concat(first, other)
        return first

    whole = run_in_steps(build, x, STEPS[0], level)
    expected = causal_convolution_reference(x, weight, bias)
    assert np.abs(whole - expected).max() <= 3e-6 * np.abs(expected).max()
    for steps in STEPS[1:]:
        np.testing.assert_array_equal(run_in_steps(build, x, steps, level, threads=2), whole)
