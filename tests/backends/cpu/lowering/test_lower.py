"""Tests of lowering: barriers exactly where threads meet in memory, and no memory reused too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of
from llmrun.model.archs import llama
from llmrun.model.plan.elementary import Pairing, Rope
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.embedding import AddImages, PlaceImages
from llmrun.model.plan.ops.experts import Gating
from llmrun.model.plan.ops.linear import FloatWords, IntegerWords, Linear
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoders.registry import ENCODERS, encoder_of
from llmrun.model.vision.projector import read_projector
from tests.support.kernels.lowered_plans import count_barriers, lowered_plan, without_optional
from tests.support.kernels.races import accesses, needless_barriers, races, word_of
from tests.support.kernels.random_adapters import with_random_adapters
from tests.support.kernels.row_ops_plan import row_ops_plan
from tests.support.kernels.runs import matrix_of
from tests.support.models.fidelity import head_plan_of, plan_of
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS, tiny_encoder
from tests.support.models.tiny_models import TINY_MODELS, tiny_model
from tests.support.vision.projectors import tiny_projector

# One variant per architecture is enough, because all variants have the same ops.
ARCHITECTURES = list({row.architecture: name for name, row in TINY_ARCHITECTURES.items()}.values())


@pytest.fixture
def model_plan(tmp_path: Path) -> Callable[[str], Plan]:
    def plan_of(name: str) -> Plan:
        with open_gguf(tiny_model(tmp_path, name)) as file:
            return llama.plan(file, llama.read_config(file))

    return plan_of


@pytest.mark.push
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_no_two_threads_meet_in_memory(model_plan: Callable[[str], Plan], name: str, one_row: bool) -> None:
    assert races(lowered_plan(model_plan(name)), one_row=one_row) == []


@pytest.mark.push
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_two_threads_meet_in_a_model_of_any_architecture(tmp_path: Path, name: str) -> None:
    lowered = lowered_plan(plan_of(tiny_architecture(tmp_path, name)))
    assert races(lowered, one_row=True) == []
    assert races(lowered, one_row=False) == []


@pytest.mark.parametrize(
    "name",
    ["qwen35 layers by name, with a layer ahead", "glm4moe", "deepseek2 GLM-4.7-Flash, fused, with a layer ahead"],
)
def test_no_two_threads_meet_in_a_draft_head(tmp_path: Path, name: str) -> None:
    plan = head_plan_of(tiny_architecture(tmp_path, name))
    assert plan is not None
    lowered = lowered_plan(plan)
    assert races(lowered, one_row=True) == []
    assert races(lowered, one_row=False) == []


@pytest.mark.push
@pytest.mark.parametrize("row", [*TINY_ENCODERS.values(), *TINY_RERANKERS.values()], ids=lambda row: row.architecture)
def test_no_two_threads_meet_in_an_encoder(tmp_path: Path, row: TinyArchitecture) -> None:
    lowered = lowered_plan(plan_of(tiny_encoder(tmp_path, row)))
    assert races(lowered, one_row=True) == []
    assert races(lowered, one_row=False) == []


@pytest.mark.push
@pytest.mark.parametrize("family", ENCODERS)
def test_no_two_threads_meet_in_an_encoder_of_images(tmp_path: Path, family: str) -> None:
    path = tiny_projector(tmp_path, family)
    with open_gguf(path) as file:
        lowered = lowered_plan(encoder_of(file, read_projector(path)).plan)
    assert races(lowered, one_row=True) == []
    assert races(lowered, one_row=False) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_no_two_threads_meet_in_row_ops(one_row: bool) -> None:
    lowered = lowered_plan(row_ops_plan())
    kernels = {name.function for name in lowered.kernels}
    assert {"rmsnorm", "layernorm", "add", "gated", "concat", "keep", "convolve", "soft_cap", "clamp"} <= kernels
    assert {"causal_convolution", "delta_rule", "ssd", "selective_scan", "xielu", "match_length", "cut_off"} <= kernels
    assert races(lowered, one_row=one_row) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_a_missing_barrier_would_be_seen(model_plan: Callable[[str], Plan], one_row: bool) -> None:
    """Tests the check itself: removing any barrier but the last must cause a race."""
    lowered = lowered_plan(model_plan("Q4_0 untied"))
    assert needless_barriers(lowered, one_row=one_row) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_no_two_threads_meet_in_adapters(one_row: bool) -> None:
    lowered = lowered_plan(with_random_adapters(row_ops_plan(), [3, 16]))
    assert {"reduce", "look_up", "expand"} <= {name.function for name in lowered.kernels}
    assert races(lowered, one_row=one_row) == []
    assert races(without_optional(lowered), one_row=one_row) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_no_two_threads_meet_in_images(model_plan: Callable[[str], Plan], one_row: bool) -> None:
    plan = model_plan("Q4_0 untied")
    [place] = [op for op in plan.ops if isinstance(op, PlaceImages)]
    index = next(index for index, op in enumerate(plan.ops) if isinstance(op, Linear) and op.adds)
    plan.ops.insert(index + 1, AddImages(1, place.out))
    lowered = lowered_plan(plan)
    assert {"place_images", "add_images"} <= {name.function for name in lowered.kernels}
    assert races(lowered, one_row=one_row) == []
    assert races(without_optional(lowered), one_row=one_row) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_steps_of_plain_text_take_no_more_barriers(model_plan: Callable[[str], Plan], one_row: bool) -> None:
    plan = model_plan("Q4_0 untied")
    plain = without_optional(lowered_plan(with_random_adapters(plan, [3, 16])))
    without = lowered_plan(plan.without_images())
    assert races(plain, one_row=one_row) == []
    assert needless_barriers(plain, one_row=one_row) == []
    assert count_barriers(plain, one_row=one_row) == count_barriers(without, one_row=one_row)


def test_a_layer_takes_five_barriers_in_a_step_of_one_row(model_plan: Callable[[str], Plan]) -> None:
    """The barriers come after q, k and v; after attention; after the output projection; after gate and up; and after
    down. Embedding and output add two more.
    """
    for name, layers in (("Q4_0 untied", 3), ("F32", 2), ("Q4_1 llama3 rope", 2)):
        assert count_barriers(lowered_plan(model_plan(name).without_images()), one_row=True) == 5 * layers + 2


def test_sums_of_norms_take_no_barriers_in_a_step_of_one_row() -> None:
    """Uses layers that normalize what they add to the residual, as Gemma's do.

    Each layer then needs barriers only after its two matrices, and one follows the logits. From the embedding on, each
    thread has its own copy of the sum.
    """
    plan, norm = Plan(), np.ones(64, np.float32)
    square = matrix_of("q8_0", np.eye(64, dtype=np.float32))
    x = plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"), scale=8.0)
    for _ in range(3):
        h = plan.rmsnorm(plan.linear(plan.rmsnorm(x, norm, 1e-5), square), norm, 1e-5)
        plan.add(plan.rmsnorm(plan.linear(h, square), norm, 1e-5), to=x)
    plan.output(x, square)
    lowered = lowered_plan(plan)
    assert count_barriers(lowered, one_row=True) == 3 * 2 + 1
    assert races(lowered, one_row=True) == races(lowered, one_row=False) == []


def test_a_sum_that_products_are_added_onto_is_shared() -> None:
    """One thread adds a row to it while the others wait."""
    plan = Plan()
    square = matrix_of("q8_0", np.eye(64, dtype=np.float32))
    x = plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"))
    plan.linear_add(plan.linear(x, square), square, to=x)
    plan.add(plan.linear(x, square), to=x)
    plan.output(x, square)
    lowered = lowered_plan(plan)
    [adds] = [index for index, name in enumerate(lowered.kernels) if name.function == "add"]
    flags = int(lowered.records[adds, records.OP_FLAGS // records.WORD])
    assert flags & records.FLAG_BARRIER
    assert not flags & records.FLAG_REPLICATED
    assert races(lowered, one_row=True) == races(lowered, one_row=False) == []


def heads_plan(layers: int, kind: str = "q8_0") -> Plan:
    """Return a plan that maps each of 4 heads from 32 features to 16 and back, twice with the same matrices."""
    plan = Plan()
    x = plan.embed(matrix_of("f32", np.ones((4, 128), np.float32), "table"))
    to_16, to_32 = (matrix_of(kind, np.ones((4 * n, 32), np.float32), f"to {n}") for n in (16, 32))
    for _ in range(layers):
        a, b = (plan.head_linear(x, to_16, heads=4) for _ in range(2))
        x = plan.head_linear(plan.concat(a, b, groups=4), to_32, heads=4)
    plan.output(x, matrix_of(kind, np.ones((16, 128), np.float32)))
    return plan


@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("kind", ["q8_0", "f32"])
def test_no_two_threads_meet_among_matrices_of_heads(one_row: bool, kind: str) -> None:
    lowered = lowered_plan(heads_plan(3, kind))
    assert races(lowered, one_row=one_row) == []
    assert needless_barriers(lowered, one_row=one_row) == []


@pytest.mark.parametrize("kind", ["q8_0", "f32"])
def test_heads_whose_outputs_overlap_would_be_seen(kind: str) -> None:
    """Tests the check itself: one head's outputs overlap another's fully or by half."""
    lowered = lowered_plan(heads_plan(1, kind))
    at = records.offsets(FloatWords).out if kind == "f32" else records.offsets(IntegerWords).out
    word = at // records.WORD
    products = [index for index, name in enumerate(lowered.kernels) if name.function == "linear"]
    first, second = (lowered.records[index] for index in products[-3:-1])  # the last product makes the logits
    right = int(second[word])
    for moved in (int(first[word]), right - 64):
        second[word] = moved
        assert races(lowered, one_row=True)
        assert races(lowered, one_row=False)
    second[word] = right
    assert races(lowered, one_row=True) == races(lowered, one_row=False) == []


def test_matrices_of_heads_take_a_barrier_together() -> None:
    """The barriers come after both products of one input, after the product of their concat, and after the logits."""
    assert count_barriers(lowered_plan(heads_plan(3)), one_row=True) == 2 * 3 + 1


def test_parts_and_scales_of_what_each_thread_has_take_no_barriers_in_a_step_of_one_row() -> None:
    """Each thread has its own copy of the embedding and of everything computed from it here. The only barrier follows
    the logits.
    """
    plan = Plan()
    x = plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"))
    plan.scale(x, 0.5)
    joined = plan.concat_to_each(plan.slice(x, 0, 32), x, groups=2)
    plan.scale(joined, 0.5)
    plan.output(joined, matrix_of("q8_0", np.ones((16, 128), np.float32)))
    lowered = lowered_plan(plan)
    assert count_barriers(lowered, one_row=True) == 1
    assert races(lowered, one_row=True) == races(lowered, one_row=False) == []


def looking_back_plan() -> Plan:
    """Return a plan of layers that store keys and smaller values, and of layers that reuse the one before."""
    plan, norm, shape = Plan(), np.ones(96, np.float32), AttentionShape(4, 2, 48, value_size=32)

    def matrix(name: str, rows: int, columns: int) -> Matrix:
        return matrix_of("q8_0", np.ones((rows, columns), np.float32), name)

    rope = Rope(np.ones(24), Pairing.NEOX)
    x = plan.embed(matrix_of("f32", np.ones((4, 96), np.float32), "table"))
    for layer in range(6):
        h = plan.rmsnorm(x, norm, 1e-5)
        q = plan.linear(h, matrix("q", 192, 96))
        if layer % 2:
            seen = plan.attention_again(q, shape, rope)
        else:
            k, v = plan.linear(h, matrix("k", 96, 96)), plan.linear(h, matrix("v", 64, 96))
            seen = plan.attention(q, k, v, shape, rope, query_rope=replace(rope, growth=(0.1, 8)))
        plan.linear_add(seen, matrix("o", 96, 128), to=x)
    plan.output(x, matrix("output", 16, 96))
    return plan


@pytest.mark.parametrize("one_row", [True, False])
def test_no_two_threads_meet_where_layers_look_back_on_anothers_keys(one_row: bool) -> None:
    assert races(lowered_plan(looking_back_plan()), one_row=one_row) == []


def test_to_rotate_queries_takes_no_barrier_in_a_step_of_one_row() -> None:
    """Each layer needs barriers after its projections, attention and output projection. Embedding and output add two
    more.
    """
    lowered = lowered_plan(looking_back_plan())
    assert [name.function for name in lowered.kernels].count("rotate") == 3
    assert count_barriers(lowered, one_row=True) == 3 * 6 + 2


def test_linear_ops_on_one_input_run_into_each_other(model_plan: Callable[[str], Plan]) -> None:
    lowered = lowered_plan(model_plan("Q4_0 untied"))
    flags = lowered.records[:, records.OP_FLAGS // records.WORD]
    linear = [index for index, name in enumerate(lowered.kernels) if name.function == "linear"]
    waits = [bool(flags[index] & records.FLAG_BARRIER) for index in linear]
    layer = [False, False, True, True, False, True, True]  # q k v, o, gate up, down
    assert waits == layer * 3 + [True]


def test_an_op_that_adds_waits_for_what_it_adds_to() -> None:
    plan = Plan()
    square = matrix_of("q8_0", np.eye(64, dtype=np.float32))
    x = plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"))
    y = plan.linear(x, square)
    plan.linear_add(x, square, to=y)
    plan.output(y, square)
    for one_row in (True, False):
        assert races(lowered_plan(plan), one_row=one_row) == []


def experts_plan(layers: int = 3, kind: str = "q8_0") -> Plan:
    """Return a plan of expert layers with every optional part: each kind of bias, and experts that all rows use."""
    plan, norm = Plan(), np.ones(64, np.float32)

    def matrix(name: str, rows: int, columns: int, of: str = kind) -> Matrix:
        return matrix_of(of, np.ones((rows, columns), np.float32), name)

    x = plan.embed(matrix("table", 4, 64, "f32"))
    for layer in range(layers):
        v = plan.linear(plan.rmsnorm(x, norm, 1e-5), matrix("v", 64, 64))
        plan.linear_add(v, matrix("o", 64, 64), to=x)
        h = plan.rmsnorm(x, norm, 1e-5)
        logits = plan.bias(plan.linear(h, matrix("router", 6, 64, "f32")), np.ones(6, np.float32))
        routing = plan.route(logits, 2, Gating.SOFTMAX, normalized=True)
        gate, up = (plan.expert_linear(h, matrix(name, 6 * 32, 64), routing) for name in ("gate", "up"))
        if layer % 2:
            gate = plan.expert_bias(gate, np.ones((6, 32), np.float32), routing)
        y = plan.expert_linear(plan.swiglu(gate, up), matrix("down", 6 * 64, 32), routing)
        if layer % 2:
            y = plan.expert_bias(y, np.ones((6, 64), np.float32), routing)
            plan.combine(y, routing, to=x)
        else:
            plan.add(plan.combined(y, routing), to=x)
    plan.output(x, matrix("output", 16, 64))
    return plan


@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("kind", ["q8_0", "f32"])
def test_no_two_threads_meet_among_experts(one_row: bool, kind: str) -> None:
    assert races(lowered_plan(experts_plan(kind=kind)), one_row=one_row) == []


@pytest.mark.parametrize("one_row", [True, False])
def test_a_missing_barrier_among_experts_would_be_seen(one_row: bool) -> None:
    """Uses float weights, because with integer weights the quantization between routing and products has its own
    barrier.
    """
    lowered = lowered_plan(experts_plan(kind="f32"))
    assert needless_barriers(lowered, one_row=one_row) == []


def test_a_layer_of_experts_takes_four_barriers_in_a_step_of_one_row() -> None:
    """The barriers come after the router, after gate and up, after down, and after the combined sum. The stand-in for
    attention adds two per layer, and embedding and output add two more.
    """
    assert count_barriers(lowered_plan(experts_plan(4)), one_row=True) == (2 + 4) * 4 + 2


def test_tables_of_a_routing_are_the_next_ones_memory() -> None:
    lowered = lowered_plan(experts_plan(12))
    groups = [index for index, name in enumerate(lowered.kernels) if name.function == "group"]
    heads = [word_of(lowered, index, "head") for index in groups]
    assert len(heads) == 12
    assert len(set(heads)) <= 2


def test_memory_does_not_grow_with_the_layers() -> None:
    """A value's memory is reused as soon as all threads have passed a barrier after its last use."""

    def buffers(layers: int) -> int:
        plan = Plan()
        square = matrix_of("q8_0", np.eye(64, dtype=np.float32))
        norm = np.ones(64, np.float32)
        x = plan.embed(matrix_of("f32", np.ones((4, 64), np.float32), "table"))
        for _ in range(layers):
            h = plan.rmsnorm(x, norm, 1e-5)
            plan.linear_add(plan.swiglu(plan.linear(h, square), plan.linear(h, square)), square, to=x)
        plan.output(x, square)
        return len({use.address for uses in accesses(lowered_plan(plan)) for use in uses if use.writes})

    assert buffers(4) == buffers(12)


def test_values_of_an_odd_width_keep_their_memory() -> None:
    """Their padding must stay zero, and another value would overwrite it."""
    plan = Plan()
    odd = matrix_of("f32", np.ones((33, 33), np.float32))
    value: Value = plan.embed(matrix_of("f32", np.ones((4, 33), np.float32), "table"))
    for _ in range(4):
        value = plan.linear(value, odd)
    plan.output(value, odd)
    written = [use.address for uses in accesses(lowered_plan(plan)) for use in uses if use.writes]
    assert len(written) == len(set(written)) == 5


@pytest.mark.parametrize(("max_rows", "threads"), [(1, 4), (16, 2)])
def test_a_buffer_has_a_row_for_every_row_and_for_every_thread(max_rows: int, threads: int) -> None:
    plan = Plan()
    square = matrix_of("f32", np.eye(64, dtype=np.float32))
    plan.output(plan.rmsnorm(plan.embed(square), np.ones(64, np.float32), 1e-5), square)
    lowered = lowered_plan(plan, max_rows, threads)
    regions = {address_of(array): array.nbytes for array in lowered.keep if isinstance(array, np.ndarray)}
    [embedded, normalized] = [use.address for uses in accesses(lowered) for use in uses if use.writes]
    for address in (embedded, normalized):
        assert regions[address] >= max(max_rows, threads) * 256


def test_every_op_has_a_claim_counter_on_its_own_cache_line(model_plan: Callable[[str], Plan]) -> None:
    lowered = lowered_plan(model_plan("F32"))
    counters = lowered.records[:, records.OP_CLAIM // records.WORD]
    assert len(set(counters.tolist())) == len(counters)
    assert (np.diff(counters) == records.CACHE_LINE).all()
