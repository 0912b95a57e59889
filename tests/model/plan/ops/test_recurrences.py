"""Tests of the reference functions of recurrent layers against closed forms in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.model.plan.ops.convolution import causal_convolution_reference
from llmrun.model.plan.ops.norms import rmsnorm_reference
from llmrun.model.plan.ops.recurrences import decay_reference, delta_rule_reference, ssd_reference

ROWS, HEADS, KEY_SIZE, VALUE_SIZE = 70, 3, 16, 32


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def products_of_decays(decays: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the product of the decays after row j, up to and including row i, as float64[heads, i, j]; 0 if j > i."""
    logs = np.cumsum(np.log(decays.astype(np.float64)), axis=0).T
    return np.tril(np.exp(np.minimum(logs[:, :, None] - logs[:, None, :], 0)))


def decays_of(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0.2, 0.99, (ROWS, HEADS)).astype(np.float32)


def test_ssd_is_attention_with_decays() -> None:
    """The duality of Mamba-2: out = (products of decays * (c . b)) . (steps * x)."""
    x, b, c = (
        normal(ROWS, HEADS, VALUE_SIZE, seed=0),
        normal(ROWS, HEADS, KEY_SIZE, seed=1),
        normal(ROWS, HEADS, 16, seed=2),
    )
    decays, steps = decays_of(3), np.abs(normal(ROWS, HEADS, seed=4))
    scores = np.einsum("ihk,jhk->hij", c.astype(np.float64), b) * products_of_decays(decays)
    expected = np.einsum("hij,jhv->ihv", scores, steps[:, :, None].astype(np.float64) * x)
    assert np.abs(ssd_reference(x, b, c, decays, steps) - expected).max() <= 1e-6 * np.abs(expected).max()


def test_the_delta_rule_solves_a_triangular_system() -> None:
    """The WY form of DeltaNet: the changes of all rows solve (I + beta * (k . k) * decays) changes = beta * v.

    Below the diagonal, the products of decays include the row's own decay, because S decays before it is read.
    """
    queries, keys = normal(ROWS, HEADS, KEY_SIZE, seed=5), normal(ROWS, HEADS, KEY_SIZE, seed=6)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values, decays = normal(ROWS, HEADS, VALUE_SIZE, seed=7), decays_of(8)
    betas = np.random.default_rng(9).uniform(0, 1, (ROWS, HEADS)).astype(np.float32)
    products = products_of_decays(decays)
    b = betas.T.astype(np.float64)[:, :, None]
    between = np.tril(np.einsum("ihk,jhk->hij", keys.astype(np.float64), keys) * products, -1)
    changes = np.linalg.solve(np.eye(ROWS) + b * between, b * values.transpose(1, 0, 2))
    scores = np.einsum("ihk,jhk->hij", queries.astype(np.float64), keys) * products
    expected = (scores @ changes).transpose(1, 0, 2)
    actual = delta_rule_reference(queries, keys, values, decays, betas)
    assert np.abs(actual - expected).max() <= 1e-6 * np.abs(expected).max()


def test_the_delta_rule_replaces_the_value_of_a_key() -> None:
    """With a beta of 1 and no decay, a value that is stored again under the same key replaces the first one."""
    key = np.zeros((2, 1, 16), np.float32)
    key[:, 0, 5] = 1
    values, ones = normal(2, 1, 16, seed=10), np.ones((2, 1), np.float32)
    np.testing.assert_allclose(delta_rule_reference(key, key, values, ones, ones), values, rtol=1e-6)


@pytest.mark.parametrize("gate", [-200.0, -1.0, 0.0, 3.0, 200.0])
def test_decays_are_exponentials_of_steps(gate: float) -> None:
    gates, rate, bias = (np.array([[value]], np.float32) for value in (gate, -0.5, 0.25))
    decays, steps = decay_reference(gates, rate, bias)
    expected = np.logaddexp(0, gate + 0.25)
    assert steps[0, 0] == pytest.approx(expected, rel=1e-6, abs=1e-45)
    assert decays[0, 0] == pytest.approx(np.exp(-0.5 * expected), rel=1e-6, abs=1e-45)


@pytest.mark.parametrize("bias", [None, normal(48, seed=11)], ids=["no bias", "bias"])
@pytest.mark.parametrize("taps", [2, 4])
def test_causal_convolution_matches_numpy(taps: int, bias: NDArray[np.float32] | None) -> None:
    x, weight = normal(20, 48, seed=12), normal(48, taps, seed=13)
    sums = [np.convolve(x[:, i].astype(np.float64), weight[i, ::-1])[:20] for i in range(48)]
    total = np.stack(sums, axis=1) + (0 if bias is None else bias)
    expected = total / (1 + np.exp(-total))
    np.testing.assert_allclose(causal_convolution_reference(x, weight, bias), expected, rtol=1e-5, atol=1e-6)


def test_the_l2_norm_is_an_rmsnorm_of_equal_weights() -> None:
    """See NormOps.l2norm."""
    x, scale, epsilon = normal(5, 32, seed=14), 0.25, 1e-3
    weight = np.full(32, scale * 32**-0.5, np.float32)
    expected = scale * x / np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True) + epsilon)
    np.testing.assert_allclose(rmsnorm_reference(x, weight, epsilon / 32), expected, rtol=1e-6)
