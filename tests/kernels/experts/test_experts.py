"""Tests of a mixture of experts against its NumPy twin, for any routing and at every instruction level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.backends.cpu.lowering import float_word
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.experts import HEAD_ACTIVE, HEAD_EXPERTS, Tables, tables_bytes
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.ops.experts import ExpertGroups, Gating, GroupWords, Route, RouteWords, routed_reference
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.reference import quantizing
from llmrun.model.plan.twin import Routing, Value, dequantized
from tests.support.kernels.runs import (
    EXPERT_TYPES,
    LEVELS_HERE,
    matrix_of,
    padded_rows,
    random_matrix,
    run_kernel,
    run_plan,
    whole_matrix,
    width,
)
from tests.support.tiers import examples

pytestmark = pytest.mark.push

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS_HERE)
EVERY_TYPE = pytest.mark.parametrize("kind", [*EXPERT_TYPES, "f32"])

ROWS = (1, 2, 3, 9, 17, 40)  # rows per step: experts get one row, less than a tile, or more than one tile


@dataclass(frozen=True)
class Layer:
    """A layer of experts whose router logits are the first features of x, so that a test controls the routing."""

    kind: str
    experts: int = 6
    used: int = 3
    columns: int = 0
    inner: int = 0
    biased: bool = False  # also gives the experts scales
    apart: bool = False  # keeps the output separate from the residual
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
        scales = random.standard_normal(self.experts).astype(np.float32) if self.biased else None
        routing = plan.route(logits, self.used, self.gating, normalized=True, expert_scales=scales)
        g, u = plan.expert_linear(x, gate, routing), plan.expert_linear(x, up, routing)
        if self.biased:
            g = plan.expert_bias(g, random.standard_normal((self.experts, inner)).astype(np.float32), routing)
        y = plan.expert_linear(plan.gated(g, u, Activation.SILU), down, routing)
        if self.biased:
            y = plan.expert_bias(y, random.standard_normal((self.experts, self.width)).astype(np.float32), routing)
        if self.apart:
            plan.add(plan.combined(y, routing), to=residual)
        else:
            plan.combine(y, routing, to=residual)
        plan.output(residual, matrix_of("f32", unit, "logits"))

    def rows(self, chosen: NDArray[np.int64], seed: int = 0) -> NDArray[np.float32]:
        """Return inputs that the router sends to `chosen`, int64[rows, used]."""
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
    """Assert that the result is near the expected one.

    Activations are rounded to int8 relative to the largest of their block. A difference in the last place of the gated
    product may tip that rounding and then grows to a hundredth of the product. Almost all values are nearer.
    """
    error = np.abs(actual - expected) / np.abs(expected).max()
    assert error.max() < 5e-3
    assert np.median(error) < 1e-6


# --- whole layers -----------------------------------------------------------------------------------------------------


@EVERY_LEVEL
@EVERY_TYPE
def test_a_layer_is_near_its_twin(level: str, kind: str) -> None:
    for number, rows in enumerate(ROWS):
        layer = Layer(kind, biased=number % 2 == 0)
        x = layer.rows(any_choice(layer, rows, rows), rows)
        assert_near(run_plan(layer.build, x, level=level, threads=1 + rows % 3), twin(layer.build, x))


@EVERY_TYPE
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_row_with_biases_is_each_threads_own(kind: str, threads: int) -> None:
    layer = Layer(kind, biased=True)
    x = layer.rows(any_choice(layer, 1))
    assert_near(run_plan(layer.build, x, threads=threads), twin(layer.build, x))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_experts_make_may_be_a_value_of_its_own(rows: int, threads: int) -> None:
    onto, apart = Layer("q8_0"), Layer("q8_0", apart=True)
    x = onto.rows(any_choice(onto, rows))
    added, alone = (run_plan(layer.build, x, threads=threads) for layer in (onto, apart))
    np.testing.assert_array_equal(alone, added)


@pytest.mark.parametrize("kind", ["q4_k", "f32"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_all_rows_may_choose_one_expert_and_none_the_others(kind: str, rows: int) -> None:
    for expert in (0, 5):
        layer = Layer(kind, used=1)
        x = layer.rows(np.full((rows, 1), expert))
        assert_near(run_plan(layer.build, x, threads=2), twin(layer.build, x))


@pytest.mark.parametrize("kind", ["q8_0", "f32"])
@pytest.mark.parametrize("rows", [1, 14])
def test_a_row_may_be_sent_to_every_expert(kind: str, rows: int) -> None:
    layer = Layer(kind, used=6)
    x = layer.rows(any_choice(layer, rows))
    assert_near(run_plan(layer.build, x, threads=3), twin(layer.build, x))


@EVERY_LEVEL
@EVERY_TYPE
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(level: str, kind: str) -> None:
    """It does not matter how many rows share its experts, nor in what order they come."""
    layer = Layer(kind)
    chosen = any_choice(layer, 68, 1)
    chosen[10:60] = chosen[10]  # 50 or more rows share these experts, so their weights are unpacked
    x = layer.rows(chosen)
    together = run_plan(layer.build, x, level=level, threads=2)
    for first, end in ((0, 1), (10, 11), (11, 13), (9, 20), (0, 25), (25, 68)):
        part = run_plan(layer.build, x[first:end], level=level, threads=1 + end % 4)
        np.testing.assert_array_equal(part, together[first:end])
    np.testing.assert_array_equal(run_plan(layer.build, x[::-1], level=level, threads=3), together[::-1])


@EVERY_LEVEL
@pytest.mark.parametrize("kind", EXPERT_TYPES)
def test_integers_are_exact(level: str, kind: str) -> None:
    """Uses one expert with a weight of 1, both row by row and with unpacked weights."""
    size = width(kind, 64)
    experts, rows = 5, 60
    matrix = whole_matrix(kind, experts * 48, size, 3)
    random = np.random.default_rng(3)
    chosen = np.where(np.arange(rows) < 50, 2, random.integers(0, experts, rows))
    integers = random.integers(-100, 101, (rows, size // 32, 32))
    integers[:, :, 5] = 127
    integers[:, 0, :experts] = 0
    integers[np.arange(rows), 0, chosen] = 100
    integers[:, 0, 5] = 127
    x = integers.reshape(rows, -1).astype(np.float32)

    def build(plan: Plan, value: Value) -> None:
        routing = plan.route(
            plan.linear(value, matrix_of("f32", np.eye(experts, size, dtype=np.float32), "router")),
            1,
            Gating.SOFTMAX_OF_CHOSEN,
            normalized=False,
        )
        total = plan.linear(value, matrix_of("f32", np.zeros((48, size), np.float32), "zero"))
        plan.combine(plan.expert_linear(value, matrix, routing), routing, to=total)
        plan.output(total, matrix_of("f32", np.eye(48, dtype=np.float32), "unit"))

    weights = dequantized(matrix).astype(np.float64).reshape(experts, 48, size)
    expected = np.einsum("rk,rnk->rn", x.astype(np.float64), weights[chosen])
    assert np.abs(expected).max() < 2**23
    np.testing.assert_array_equal(run_plan(build, x, level=level, threads=2), expected)
    np.testing.assert_array_equal(run_plan(build, x[:1], level=level, threads=2), expected[:1])


@pytest.mark.parametrize("kind", ["q4_k", "f32"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_harms_no_other(kind: str, poison: float) -> None:
    """The router's logits are undefined for that row, but the row is still sent to experts."""
    layer = Layer(kind)
    x = layer.rows(any_choice(layer, 20))
    clean = run_plan(layer.build, x, threads=2)
    x[4] = poison
    poisoned = run_plan(layer.build, x, threads=2)
    others = np.arange(20) != 4
    np.testing.assert_array_equal(poisoned[others], clean[others])
    assert np.isnan(poisoned[4]).all()
    assert np.isnan(run_plan(layer.build, x[4:5], threads=2)).all()


def test_a_sum_that_each_thread_has_for_itself_may_be_added_onto() -> None:
    """Adds to the embedding, which no product is added to and which each thread therefore holds itself."""
    layer = Layer("q4_k")

    def build(plan: Plan, x: Value) -> None:
        logits = plan.linear(x, matrix_of("f32", np.eye(6, layer.width, dtype=np.float32), "router"))
        routing = plan.route(logits, 3, Gating.SIGMOID, normalized=False, scale=2.5)
        plan.combine(plan.expert_linear(x, random_matrix("q4_k", 6 * layer.width, layer.width), routing), routing, to=x)
        plan.output(x, matrix_of("f32", np.eye(layer.width, dtype=np.float32), "unit"))

    for rows in (1, 5):
        x = layer.rows(any_choice(layer, rows))
        assert_near(run_plan(build, x, threads=2), twin(build, x))


# --- routing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """The routing tables of a step, the (expert, first slot) of each active expert, and the number of slots."""

    chosen: NDArray[np.int32]
    weights: NDArray[np.float32]
    slots: NDArray[np.int32]
    sources: NDArray[np.int32]
    experts: NDArray[np.int32]
    active: list[tuple[int, int]]
    n_slots: int


def routed(logits: NDArray[np.float32], op: Route, level: str = LEVELS_HERE[0], threads: int = 1) -> Routed:
    """Run the routing kernels on logits float32[rows, experts]."""
    rows, experts, used = len(logits), op.routing.experts, op.routing.used
    memory = allocate(tables_bytes(experts, used, rows, 1), "tables of a test")
    tables = Tables.at(address_of(memory), experts, used, rows, 1)
    padded, scratch = padded_rows(logits), allocate(threads * 3 * round_up(4 * experts, 64), "scratch of a test")
    gating = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_OF_CHOSEN: 2}[op.gating]
    bias = None if op.selection_bias is None else padded_rows(op.selection_bias[None])
    scales = None if op.expert_scales is None else padded_rows(op.expert_scales[None])
    words = RouteWords(
        logits=address_of(padded),
        logits_stride=padded.strides[0],
        experts=experts,
        used=used,
        gating=gating,
        normalized=int(op.normalized),
        scale=float_word(op.scale),
        bias=0 if bias is None else address_of(bias),
        scratch=address_of(scratch),
        scratch_bytes=scratch.size // threads,
        chosen=tables.chosen,
        weights=tables.weights,
        row_bytes=tables.row_bytes,
        expert_scales=0 if scales is None else address_of(scales),
        groups=0 if op.groups is None else op.groups.count,
        groups_used=0 if op.groups is None else op.groups.used,
    )
    step = {records.STEP_ROWS: rows}
    run_kernel(KernelName.of("experts.routing", "route"), words, step, level=level, threads=threads)
    group = GroupWords(
        head=tables.head,
        head_bytes=tables.head_bytes,
        next_slots=tables.next_slots,
        chosen=tables.chosen,
        slots=tables.slots,
        sources=tables.sources,
        experts=tables.experts,
        row_bytes=tables.row_bytes,
        n_experts=experts,
        used=used,
    )
    run_kernel(KernelName.of("experts.routing", "group"), group, step, level=level, threads=threads)

    def table(address: int, dtype: type) -> NDArray[Any]:
        start = address - address_of(memory)
        return memory[start : start + rows * tables.row_bytes].view(dtype)

    def of_rows(address: int, dtype: type) -> NDArray[Any]:
        return table(address, dtype).reshape(rows, -1)[:, :used]

    n_active = int(memory[HEAD_ACTIVE : HEAD_ACTIVE + 8].view(np.int64)[0])
    pairs = memory[HEAD_EXPERTS : HEAD_EXPERTS + 8 * (n_active + 1)].view(np.int32).reshape(-1, 2).tolist()
    return Routed(
        of_rows(tables.chosen, np.int32),
        of_rows(tables.weights, np.float32),
        of_rows(tables.slots, np.int32),
        table(tables.sources, np.int32)[: rows * used],
        table(tables.experts, np.int32)[: rows * used],
        [(expert, first) for expert, first in pairs[:-1]],
        pairs[-1][1],
    )


def route_of(
    experts: int,
    used: int,
    gating: Gating = Gating.SOFTMAX,
    *,
    normalized: bool = True,
    biased: bool = False,
    groups: ExpertGroups | None = None,
) -> Route:
    """Return a route with a selection bias and expert scales, or without both."""
    random = np.random.default_rng(experts)
    bias, scales = (random.standard_normal(experts).astype(np.float32) if biased else None for _ in range(2))
    return Route(Value(experts), gating, normalized, 1.5, bias, scales, groups, Routing(experts, used))


@EVERY_LEVEL
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize(("experts", "used"), [(1, 1), (6, 2), (16, 16), (17, 5), (384, 8), (100, 33)])
def test_routes_are_the_twins(level: str, gating: Gating, experts: int, used: int) -> None:
    """The experts and their order are equal; weights are within 8 units in the last place (at most 5 were measured)."""
    logits = 3 * np.random.default_rng(used).standard_normal((21, experts)).astype(np.float32)
    for normalized, biased in ((True, False), (False, True)):
        op = route_of(experts, used, gating, normalized=normalized, biased=biased)
        found = routed(logits, op, level, threads=3)
        chosen, weights = routed_reference(logits, op)
        np.testing.assert_array_equal(found.chosen, chosen)
        assert (np.abs(found.weights - weights) / np.spacing(np.abs(weights))).max() <= 8


GROUPED = [(6, 2, 3, 1), (16, 4, 4, 2), (40, 9, 20, 5), (256, 8, 8, 4), (48, 5, 2, 1), (102, 33, 17, 16)]


@EVERY_LEVEL
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "used", "groups", "groups_used"), GROUPED)
def test_grouped_routes_equal_the_twin(
    level: str, experts: int, used: int, groups: int, groups_used: int, biased: bool
) -> None:
    """Half of the rows have integer logits, so that experts and groups tie."""
    random = np.random.default_rng(experts)
    logits = 3 * random.standard_normal((40, experts)).astype(np.float32)
    logits[::2] = random.integers(-1, 2, (20, experts))
    op = route_of(experts, used, Gating.SIGMOID, biased=biased, groups=ExpertGroups(groups, groups_used))
    found = routed(logits, op, level, threads=3)
    chosen, weights = routed_reference(logits, op)
    np.testing.assert_array_equal(found.chosen, chosen)
    assert (np.abs(found.weights - weights) / np.spacing(np.abs(weights))).max() <= 8
    assert max(len(set(row)) for row in (chosen // (experts // groups)).tolist()) <= groups_used


@given(data=st.data())
@settings(max_examples=examples(60))
def test_groups_of_any_size_equal_the_twin(data: st.DataObject) -> None:
    """Few distinct logits, some of them not finite, so that experts and groups often tie or have no score."""
    count, size = data.draw(st.integers(2, 12)), data.draw(st.integers(2, 20))
    groups = ExpertGroups(count, data.draw(st.integers(1, count - 1)))
    used = data.draw(st.integers(1, groups.used * size))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = random.choice(np.array([-2, -0.0, 0.0, 1, 2, np.nan, np.inf, -np.inf]), (5, count * size))
    op = route_of(count * size, used, Gating.SOFTMAX_OF_CHOSEN, biased=data.draw(st.booleans()), groups=groups)
    with np.errstate(invalid="ignore"):  # the weights of experts whose logits are not finite
        chosen, _ = routed_reference(logits.astype(np.float32), op)
    np.testing.assert_array_equal(routed(logits.astype(np.float32), op).chosen, chosen)


def test_the_two_best_experts_of_a_group_count() -> None:
    """A group with one outstanding expert loses to a group with two good ones."""
    logits = np.array([[9, 0, 0, 5, 5, 0, 4, 0, 4]], np.float32)
    op = route_of(9, 2, Gating.SOFTMAX_OF_CHOSEN, groups=ExpertGroups(3, 1))
    assert routed(logits, op).chosen.tolist() == [[3, 4]]
    assert routed_reference(logits, op)[0].tolist() == [[3, 4]]


@EVERY_LEVEL
def test_equal_groups_are_taken_in_order(level: str) -> None:
    op = route_of(24, 8, Gating.SIGMOID, groups=ExpertGroups(6, 2))
    found = routed(np.zeros((3, 24), np.float32), op, level)
    np.testing.assert_array_equal(found.chosen, [range(8)] * 3)


@EVERY_LEVEL
@pytest.mark.parametrize("gating", Gating)
def test_of_equal_experts_the_lower_number_comes_first(level: str, gating: Gating) -> None:
    logits = np.random.default_rng(2).integers(-1, 2, (30, 40)).astype(np.float32)
    logits[0] = 0
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0
    op = route_of(40, 9, gating)
    found = routed(logits, op, level)
    np.testing.assert_array_equal(found.chosen, routed_reference(logits, op)[0])
    np.testing.assert_array_equal(found.chosen[:2], [range(9)] * 2)


@EVERY_LEVEL
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [None, ExpertGroups(10, 4)])
def test_logits_that_are_not_finite_choose_experts_too(
    level: str, gating: Gating, biased: bool, groups: ExpertGroups | None
) -> None:
    """Every row must get distinct experts that exist."""
    random = np.random.default_rng(3)
    logits = random.standard_normal((64, 20)).astype(np.float32)
    strange = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40], np.float32)
    some = random.random(logits.shape) < 0.3
    logits[some] = random.choice(strange, int(some.sum()))
    logits[0], logits[1], logits[2] = np.nan, np.inf, -np.inf
    quiet = np.uint32(0x7FC00000) | random.integers(0, 1 << 22, 20).astype(np.uint32)
    logits[3] = quiet.view(np.float32)
    found = routed(logits, route_of(20, 7, gating, biased=biased, groups=groups), level, threads=2)
    assert ((found.chosen >= 0) & (found.chosen < 20)).all()
    assert all(len(set(row)) == 7 for row in found.chosen.tolist())


@given(data=st.data())
@settings(max_examples=examples(30))
def test_slots_are_in_order_of_experts_and_rows(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 70))
    used, rows = data.draw(st.integers(1, experts)), data.draw(st.sampled_from([1, 2, 16, 33, 256]))
    logits = np.random.default_rng(data.draw(st.integers(0, 1000))).standard_normal((rows, experts))
    found = routed(logits.astype(np.float32), route_of(experts, used), threads=data.draw(st.integers(1, 3)))
    pairs = sorted((expert, row) for row in range(rows) for expert in found.chosen[row].tolist())
    assert [*zip(found.experts.tolist(), found.sources.tolist(), strict=True)] == pairs
    firsts: dict[int, int] = {}
    for slot, (expert, _) in enumerate(pairs):
        firsts.setdefault(expert, slot)
    assert found.active == list(firsts.items())
    assert found.n_slots == rows * used
    np.testing.assert_array_equal(found.sources[found.slots], np.repeat(np.arange(rows)[:, None], used, 1))
    np.testing.assert_array_equal(found.experts[found.slots], found.chosen)
