"""A mixture of experts against its NumPy twin: whatever rows are sent wherever, at every level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.kernels.plan import Plan
from llmrun.kernels.plan_ops import Activation, Gating, Value
from llmrun.kernels.reference import quantizing
from tests.support.kernel_runs import EXPERT_TYPES, LEVELS_HERE, matrix_of, random_matrix, run_plan, width

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
EVERY_TYPE = pytest.mark.parametrize("kind", [*EXPERT_TYPES, "f32"])

ROWS = (1, 2, 3, 9, 17, 40)  # of a step: experts of one row, of less than a tile, of more than one


@dataclass(frozen=True)
class Layer:
    """A layer of experts: logits of the router are the first features of x, so that a test says who goes where."""

    kind: str
    experts: int = 6
    used: int = 3
    columns: int = 0
    inner: int = 0
    biased: bool = False
    gating: Gating = Gating.SOFTMAX

    @property
    def width(self) -> int:
        return self.columns or width(self.kind, 64)

    def build(self, plan: Plan, x: Value) -> None:
        random = np.random.default_rng(5)
        inner = self.inner or width(self.kind, 48)
        gate, up = (random_matrix(self.kind, self.experts * inner, self.width, n, f"w{n}") for n in (1, 2))
        down = random_matrix(self.kind, self.experts * self.width, inner, 3, "w3")
        unit = np.eye(self.width, dtype=np.float32)
        logits = plan.linear(x, matrix_of("f32", unit[: self.experts], "router"))
        residual = plan.linear(x, matrix_of("f32", unit, "unit"))
        routing = plan.route(logits, self.used, self.gating, normalized=True)
        g, u = plan.expert_linear(x, gate, routing), plan.expert_linear(x, up, routing)
        if self.biased:
            g = plan.expert_bias(g, random.standard_normal((self.experts, inner)).astype(np.float32), routing)
        y = plan.expert_linear(plan.gated(g, u, Activation.SILU), down, routing)
        if self.biased:
            y = plan.expert_bias(y, random.standard_normal((self.experts, self.width)).astype(np.float32), routing)
        plan.combine(y, routing, to=residual)
        plan.output(residual, matrix_of("f32", unit, "logits"))

    def rows(self, chosen: NDArray[np.int64], seed: int = 0) -> NDArray[np.float32]:
        """Inputs that are sent to `chosen` int64[rows, used]."""
        random = np.random.default_rng(seed)
        x = random.standard_normal((len(chosen), self.width)).astype(np.float32)
        x[:, : self.experts] = random.uniform(-2, -1, (len(x), self.experts))
        for rank in range(self.used):
            x[np.arange(len(x)), chosen[:, rank]] = 3 - np.float32(0.5) * rank
        return x


def any_choice(layer: Layer, rows: int, seed: int = 0) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    return np.array([random.permutation(layer.experts)[: layer.used] for _ in range(rows)])


def twin(build: Callable[[Plan, Value], None], x: NDArray[np.float32]) -> NDArray[np.float32]:
    plan = Plan()
    build(plan, plan.embed(matrix_of("f32", x, "x")))
    return quantizing(plan, np.arange(len(x), dtype=np.int32), "f16")


def assert_near(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Activations are rounded to int8 of their block's largest: a difference in the last place of the gated product may
    fall on the other side, and is then a hundredth of it. Almost all are nearer."""
    error = np.abs(actual - expected) / np.abs(expected).max()
    assert error.max() < 5e-3
    assert np.median(error) < 1e-6


@EVERY_LEVEL
@EVERY_TYPE
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_near_its_twin(level: str, kind: str, biased: bool) -> None:
    layer = Layer(kind, biased=biased)
    for rows in ROWS:
        x = layer.rows(any_choice(layer, rows, rows), rows)
        assert_near(run_plan(layer.build, x, level=level, threads=1 + rows % 3), twin(layer.build, x))
