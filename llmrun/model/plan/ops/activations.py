"""Ops that compute the activation functions of feed-forward networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.elementary import sigmoid_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run

GELU_CUBIC = 0.044715
GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_QUICK_SLOPE = 1.702
CLAMP = 7.0
CLAMPED_SLOPE = 1.702


class Activation(StrEnum):
    NONE = "none"  # x
    SILU = "silu"  # x / (1 + exp(-x))
    SIGMOID = "sigmoid"  # 1 / (1 + exp(-x))
    TANH = "tanh"
    RELU = "relu"  # max(x, 0)
    RELU_SQUARED = "relu squared"  # max(x, 0)^2
    GELU = "gelu"  # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    GELU_ERF = "gelu erf"  # 0.5 x (1 + erf(x / sqrt(2)))
    GELU_QUICK = "gelu quick"  # x / (1 + exp(-1.702 x))
    # gpt-oss clamps `gate` to at most 7 and `up` to [-7, 7], then computes gate / (1 + exp(-1.702 gate)) * (up + 1).
    CLAMPED_SILU = "clamped silu"


@dataclass(frozen=True, slots=True)
class Gated(Op):
    """An op that computes activation(gate) * up."""

    gate: Value
    up: Value
    activation: Activation
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.gate, self.up)

    def twin(self, run: Run) -> None:
        run.values[self.out] = gated_reference(run.values[self.gate], run.values[self.up], self.activation)


@dataclass(frozen=True, slots=True)
class Activate(Op):
    """An op that computes activation(x), where the activation is not CLAMPED_SILU."""

    x: Value
    activation: Activation
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = activation_reference(run.values[self.x], self.activation)


@dataclass(frozen=True, slots=True)
class XieluCurve:
    """The parameters of xIELU (https://arxiv.org/abs/2411.13010), an activation whose shape is learned.

    positive  factor of the square of positive numbers
    negative  factor of the exponential for negative numbers
    slope     slope at 0
    least     the largest argument of the exponential
    """

    positive: float
    negative: float
    slope: float
    least: float


@dataclass(frozen=True, slots=True)
class Xielu(Op):
    """An op that computes xIELU:

    out = positive * x^2 + slope * x                        for x >= 0
    out = negative * (exp(min(x, least)) - 1 - x) + slope * x  for x < 0
    """

    x: Value
    curve: XieluCurve
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.values[self.out] = xielu_reference(run.values[self.x], self.curve)


class GatedWords(NamedTuple):
    """The op record of `gated`."""

    gate: int
    gate_stride: int
    up: int
    up_stride: int
    out: int
    out_stride: int
    width: int


class XieluWords(NamedTuple):
    """The op record of `xielu`. The last four words are float32."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    width: int
    positive: int
    negative: int
    slope: int
    least: int


def activation_reference(x: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Apply an activation other than CLAMPED_SILU to float32[rows, width]."""
    if activation is Activation.SILU:
        silu: NDArray[np.float32] = x * sigmoid_reference(x)
        return silu
    if activation is Activation.SIGMOID:
        return sigmoid_reference(x)
    if activation is Activation.GELU_QUICK:
        quick: NDArray[np.float32] = x * sigmoid_reference(np.float32(GELU_QUICK_SLOPE) * x)
        return quick
    if activation is Activation.GELU_ERF:
        halves = [0.5 * math.erfc(-number / math.sqrt(2)) for number in x.ravel().tolist()]
        exact: NDArray[np.float32] = (x * np.array(halves).reshape(x.shape)).astype(np.float32)
        return exact
    if activation is Activation.NONE:
        return x
    if activation is Activation.TANH:
        return np.tanh(x)
    if activation is Activation.RELU:
        return np.maximum(x, np.float32(0))
    if activation is Activation.RELU_SQUARED:
        return np.square(np.maximum(x, np.float32(0)))
    assert activation is Activation.GELU
    inner = np.float32(GELU_SLOPE) * (x + np.float32(GELU_CUBIC) * x * x * x)
    return (np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))).astype(np.float32)


def gated_reference(gate: NDArray[np.float32], up: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Compute activation(gate) * up, where gate, up and the result are float32[rows, width]."""
    if activation is Activation.CLAMPED_SILU:
        gate = np.minimum(gate, np.float32(CLAMP))
        up = np.clip(up, np.float32(-CLAMP), np.float32(CLAMP)) + np.float32(1)
        activated: NDArray[np.float32] = gate * sigmoid_reference(np.float32(CLAMPED_SLOPE) * gate)
    else:
        activated = activation_reference(gate, activation)
    result: NDArray[np.float32] = activated * up
    return result


def xielu_reference(x: NDArray[np.float32], curve: XieluCurve) -> NDArray[np.float32]:
    """Apply xIELU to float32[rows, width]."""
    positive, negative, slope, least = (
        np.float32(part) for part in (curve.positive, curve.negative, curve.slope, curve.least)
    )
    above = positive * np.square(np.maximum(x, np.float32(0)))
    below = negative * (np.expm1(np.minimum(x, least)) - x)
    result: NDArray[np.float32] = np.where(x < 0, below, above) + slope * x
    return result


class ActivationOps(PlanBuilder):
    __slots__ = ()

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        out = gate.like(gate.width)
        self.ops.append(Gated(gate, up, activation, out))
        return out

    def swiglu(self, gate: Value, up: Value) -> Value:
        return self.gated(gate, up, Activation.SILU)

    def activate(self, x: Value, activation: Activation) -> Value:
        out = x.like(x.width)
        self.ops.append(Activate(x, activation, out))
        return out

    def xielu(self, x: Value, curve: XieluCurve) -> Value:
        out = x.like(x.width)
        self.ops.append(Xielu(x, curve, out))
        return out
