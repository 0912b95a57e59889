"""Ops for mixtures of experts. They route rows to experts, run the experts, and combine their outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.formats.layouts.experts import LEAST_SUM
from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.elementary import sigmoid_reference, softmax_reference
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.twin import Routing, Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


class Gating(StrEnum):
    """The ways to convert the router's logits to expert weights."""

    SOFTMAX = "softmax"  # softmax over the logits of all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of chosen"  # softmax over the logits of the chosen experts only


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """`count` equal groups of consecutive experts. Each row uses experts from its `used` best groups only.

    The score of a group is the sum of its two highest probabilities, including the selection bias. Ties go to the
    lower group index, and groups whose score is NaN come last. (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    """

    count: int
    used: int


@dataclass(frozen=True, slots=True)
class Route(Op):
    """An op that chooses the `used` most probable experts for each row. Ties go to the lower expert index.

    normalized      whether to divide the weights by their sum (or by 2^-14 if the sum is smaller)
    scale           factor applied to the weights after normalization
    selection_bias  float32[experts], added to the probabilities when experts are chosen, but not to the weights
    expert_scales   float32[experts], a factor per expert that is applied last
    groups          None if rows can use all experts
    """

    logits: Value
    gating: Gating
    normalized: bool
    scale: float
    selection_bias: NDArray[np.float32] | None
    expert_scales: NDArray[np.float32] | None
    groups: ExpertGroups | None
    routing: Routing

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.logits,)

    @property
    def routed_by(self) -> Routing:
        return self.routing

    def twin(self, run: Run) -> None:
        run.routed[self.routing] = routed_reference(run.values[self.logits], self)


@dataclass(frozen=True, slots=True)
class ExpertLinear(Product):
    """An op that multiplies each chosen row by the matrix of its expert.

    `weight` contains the matrices of all experts, one after the other. If the rows of x are ALL, each row is multiplied
    by the matrix of every expert that it is routed to.
    """

    x: Value
    weight: Matrix
    routing: Routing
    out: Value  # its rows are CHOSEN

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def routed_by(self) -> Routing:
        return self.routing

    def twin(self, run: Run) -> None:
        x = run.values[self.x]
        if self.x.rows is not Rows.CHOSEN:
            x = np.repeat(x, self.routing.used, axis=0)
        chosen, _ = run.routed[self.routing]
        experts = chosen.reshape(-1)
        run.values[self.out] = expert_linear_reference(x, self.weight, self.routing.experts, experts, run.multiply)


@dataclass(frozen=True, slots=True)
class ExpertBias(Op):
    """An op that adds to each row the bias of its expert. `bias` is float32[experts, width]."""

    x: Value
    bias: NDArray[np.float32]
    routing: Routing
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def routed_by(self) -> Routing:
        return self.routing

    def twin(self, run: Run) -> None:
        chosen, _ = run.routed[self.routing]
        run.values[self.out] = run.values[self.x] + self.bias[chosen.reshape(-1)]


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """An op that sums weight * y over the experts of each row, in routing order."""

    y: Value  # its rows are CHOSEN
    routing: Routing
    out: Value
    adds: bool  # computes out += sum instead of out = sum

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.y, self.out) if self.adds else (self.y,)

    @property
    def changes(self) -> Value | None:
        return self.out if self.adds else None

    @property
    def routed_by(self) -> Routing:
        return self.routing

    def twin(self, run: Run) -> None:
        _, weights = run.routed[self.routing]
        combined = combined_reference(run.values[self.y], weights)
        run.values[self.out] = run.values[self.out] + combined if self.adds else combined


class RouteWords(NamedTuple):
    """The op record of `route`.

    `gating` is one of the constants in layouts/experts.py, and `scale` is a float32. `bias` and `expert_scales` are
    addresses, or 0 if absent. `groups` is 0 if the experts are not grouped.
    """

    logits: int
    logits_stride: int
    experts: int
    used: int
    gating: int
    normalized: int
    scale: int
    bias: int
    scratch: int
    scratch_bytes: int
    chosen: int
    weights: int
    row_bytes: int
    expert_scales: int
    groups: int
    groups_used: int


class GroupWords(NamedTuple):
    """The op record of `group`, which builds the tables of a routing (layouts/experts.py)."""

    head: int
    head_bytes: int
    next_slots: int
    chosen: int
    slots: int
    sources: int
    experts: int
    row_bytes: int
    n_experts: int
    used: int


class ExpertBiasWords(NamedTuple):
    """The op record of `bias`. `experts` and `row_bytes` locate the routing's table of experts by slot."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    bias: int
    bias_stride: int
    experts: int
    row_bytes: int
    width: int


class CombineWords(NamedTuple):
    """The op record of `combine`. `slots`, `weights` and `row_bytes` locate the tables of the routing."""

    y: int
    y_stride: int
    slots: int
    weights: int
    row_bytes: int
    used: int
    out: int
    out_stride: int
    width: int
    adds: int


def routed_reference(logits: NDArray[np.float32], op: Route) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (experts int64[rows, used], weights float32[rows, used]) for logits float32[rows, experts]."""
    match op.gating:
        case Gating.SOFTMAX:
            probabilities = softmax_reference(logits)
        case Gating.SIGMOID:
            probabilities = sigmoid_reference(logits)
        case Gating.SOFTMAX_OF_CHOSEN:
            probabilities = logits
    ranked = probabilities if op.selection_bias is None else probabilities + op.selection_bias
    chosen = np.argsort(-ranked, axis=1, kind="stable")
    if op.groups is not None:
        chosen = _best_groups_first(chosen, ranked, op.groups)
    chosen = chosen[:, : op.routing.used]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if op.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = softmax_reference(weights)
    if op.normalized:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), np.float32(LEAST_SUM))
    weights = weights * np.float32(op.scale)
    if op.expert_scales is not None:
        weights = weights * op.expert_scales[chosen]
    return chosen, weights.astype(np.float32)


def group_scores_reference(ranked: NDArray[np.float32], groups: ExpertGroups) -> NDArray[np.float32]:
    """Return the scores of the groups, float32[rows, groups], for the probabilities float32[rows, experts]."""
    members = ranked.reshape(len(ranked), groups.count, -1)
    highest = -np.sort(-members, axis=2)[:, :, :2]  # NaN is last
    with np.errstate(invalid="ignore"):
        scores: NDArray[np.float32] = highest[:, :, 0] + highest[:, :, 1]
    return scores


def _best_groups_first(
    order: NDArray[np.int64], ranked: NDArray[np.float32], groups: ExpertGroups
) -> NDArray[np.int64]:
    """Move the experts of the best groups to the front of each row of `order`, and keep their order."""
    best = np.argsort(-group_scores_reference(ranked, groups), axis=1, kind="stable")[:, : groups.used]
    group = order // (ranked.shape[1] // groups.count)
    is_outside = (group[:, :, None] != best[:, None, :]).all(axis=2)
    return np.take_along_axis(order, np.argsort(is_outside, axis=1, kind="stable"), axis=1)


def expert_linear_reference(
    x: NDArray[np.float32],
    weight: Matrix,
    n_experts: int,
    experts: NDArray[np.int64],
    linear: Callable[[Matrix, NDArray[np.float32]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Multiply each row of x float32[rows, columns] by the matrix of its expert, `experts` int64[rows].

    Returns float32[rows, outputs].
    """

    outputs = weight.rows // n_experts
    y = np.empty((len(x), outputs), np.float32)
    for expert in np.unique(experts).tolist():
        mine = experts == expert
        y[mine] = linear(weight.part(expert * outputs, outputs), x[mine])
    return y


def combined_reference(y: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum the experts' outputs of each row, in order.

    y is float32[rows * used, width], weights float32[rows, used]. Returns float32[rows, width].
    """

    of_rows = y.reshape(*weights.shape, -1)
    total = np.zeros((len(weights), y.shape[1]), np.float32)
    for rank in range(weights.shape[1]):
        total += of_rows[:, rank] * weights[:, rank, None]
    return total


class ExpertOps(PlanBuilder):
    __slots__ = ()

    def route(
        self,
        logits: Value,
        used: int,
        gating: Gating,
        *,
        normalized: bool,
        scale: float = 1.0,
        selection_bias: NDArray[np.float32] | None = None,
        expert_scales: NDArray[np.float32] | None = None,
        groups: ExpertGroups | None = None,
    ) -> Routing:
        """Append an op that chooses `used` experts for each row."""
        routing = Routing(logits.width, used)
        self.ops.append(Route(logits, gating, normalized, scale, selection_bias, expert_scales, groups, routing))
        return routing

    def expert_linear(self, x: Value, weight: Matrix, routing: Routing) -> Value:
        """Append an op that multiplies each row by the matrices of its experts.

        `weight` contains the matrices of all experts, one after the other.
        """
        out = Value(weight.rows // routing.experts, Rows.CHOSEN, routing.used)
        self.ops.append(ExpertLinear(x, weight, routing, out))
        return out

    def expert_bias(self, x: Value, bias: NDArray[np.float32], routing: Routing) -> Value:
        out = x.like(x.width)
        self.ops.append(ExpertBias(x, bias, routing, out))
        return out

    def combine(self, y: Value, routing: Routing, to: Value) -> None:
        """Append an op that adds the weighted sum of each row's expert outputs to `to`."""
        self.ops.append(Combine(y, routing, to, adds=True))

    def combined(self, y: Value, routing: Routing) -> Value:
        """Return the weighted sum of each row's expert outputs as a new value."""
        out = Value(y.width)
        self.ops.append(Combine(y, routing, out, adds=False))
        return out
