"""Tests that a profile lists every op once, by name, with its own time and needs, and that it adds up to the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.cache_size import MAX_ROWS
from llmrun.backends.cpu.lowering import Needs, StepShape
from llmrun.backends.cpu.ops.registry import needs_of
from llmrun.backends.fitting import needs_of_plan
from llmrun.formats.gguf.reader import open_gguf
from llmrun.jobs.bench.profiling import OpProfile, Profile, SpeedLimits, Spent, StepProfile, profile
from llmrun.model.plan.plan import Plan
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.tiny_architectures import tiny_architecture

pytestmark = pytest.mark.push

DEPTH, PROMPT = 40, MAX_ROWS + 50  # two steps
POSITION = 2 * 2 * (16 + 2)  # bytes of a layer's q8_0 cache: KV heads, keys and values, features and their scale
LAYER = [
    ("rmsnorm", ""),
    ("quantize", "attn_q"),
    ("linear", "attn_q"),
    ("linear", "attn_k"),
    ("linear", "attn_v"),
    ("rope", ""),
    ("attention", ""),
    ("quantize", "attn_output"),
    ("linear", "attn_output"),
    ("rmsnorm", ""),
    ("quantize", "ffn_gate"),
    ("linear", "ffn_gate"),
    ("linear", "ffn_up"),
    ("gate", ""),
    ("quantize", "ffn_down"),
    ("linear", "ffn_down"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("profile") / "tiny.gguf", weight_type="Q4_0", tied=False, context=2048)


@pytest.fixture(scope="module")
def found(path: Path) -> Profile:
    return profile(path, threads=2, prompt=PROMPT, depth=DEPTH, seconds=0.2)


@pytest.fixture(scope="module", params=["decode", "prefill"])
def step(request: pytest.FixtureRequest, found: Profile) -> StepProfile:
    return found.decode if request.param == "decode" else found.prefill


@pytest.fixture(scope="module")
def plan(path: Path) -> Plan:
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(context_size=64, threads=1))
    backend.close()
    return backend.plan


@pytest.mark.night
def test_every_op_is_told_once_in_order_and_by_name(step: StepProfile) -> None:
    told = [(one.kind, one.layer, one.name) for one in step.ops]
    layers = [(kind, layer, f"blk.{layer}.{name}.weight" if name else "") for layer in range(2) for kind, name in LAYER]
    first = [("embed", None, "token_embd.weight")]
    last = [("rmsnorm", None, ""), ("quantize", None, "output.weight"), ("linear", None, "output.weight")]
    assert told == first + layers + last


@pytest.mark.night
def test_weight_types_are_those_of_the_matrices(step: StepProfile) -> None:
    for one in step.ops:
        assert one.weight_type == ("q4_0" if one.kind in ("linear", "embed") else "")


@pytest.mark.night
def test_every_op_takes_time_and_all_together_no_more_than_the_step(step: StepProfile) -> None:
    for one in step.ops:
        assert 0 <= one.spent.waiting < one.spent.seconds
    assert step.total.seconds == pytest.approx(sum(one.spent.seconds for one in step.ops))
    assert step.outside_seconds > 0
    assert step.repetitions >= 3
    assert step.step_seconds > 0
    assert step.timing_cost == pytest.approx(step.timed_step_seconds / step.step_seconds - 1)


@pytest.mark.night
def test_kinds_are_sums_of_their_ops(step: StepProfile) -> None:
    assert sum(kind.count for kind in step.kinds) == len(step.ops)
    assert [kind.spent.seconds for kind in step.kinds] == sorted((k.spent.seconds for k in step.kinds), reverse=True)
    for kind in step.kinds:
        ops = [one for one in step.ops if (one.kind, one.weight_type) == (kind.kind, kind.weight_type)]
        assert kind.count == len(ops)
        assert kind.spent.seconds == pytest.approx(sum(one.spent.seconds for one in ops))
        assert kind.spent.needs == sum((one.spent.needs for one in ops), Needs())
    assert sum((kind.spent.needs for kind in step.kinds), Needs()) == step.total.needs


def linear(step: StepProfile, name: str) -> OpProfile:
    [one] = [one for one in step.ops if (one.kind, one.name) == ("linear", name)]
    return one


@pytest.mark.night
def test_a_decode_needs_what_the_plan_needs(found: Profile, plan: Plan) -> None:
    needs, whole = found.decode.total.needs, needs_of_plan(plan, kv_type="q8_0")
    assert needs.weight_bytes == whole.weight_bytes
    assert needs.products == sum(needs_of(op, "q8_0", StepShape(1, DEPTH)).products for op in plan.ops)
    square = linear(found.decode, "blk.1.attn_output.weight").spent.needs
    assert (square.memory_bytes, square.products) == (64 * 64 // 32 * 18, 64 * 64)
    [attention, _] = [one.spent.needs for one in found.decode.ops if one.kind == "attention"]
    assert attention.kv_bytes == (DEPTH + 1) * POSITION
    [rope, _] = [one.spent.needs for one in found.decode.ops if one.kind == "rope"]
    assert whole.kv_read.of(DEPTH + 1) == 2 * attention.kv_bytes
    assert needs.kv_bytes == 2 * (attention.kv_bytes + rope.kv_bytes)


@pytest.mark.night
def test_a_long_prompt_is_all_of_its_steps(found: Profile) -> None:
    """Weights are read once per step, and only the last step computes logits."""
    assert (found.prefill.rows, found.prefill.depth) == (PROMPT, DEPTH)
    square = linear(found.prefill, "blk.1.attn_output.weight").spent.needs
    assert (square.weight_bytes, square.products) == (2 * 64 * 64 // 32 * 18, PROMPT * 64 * 64)
    output, once = (linear(step, "output.weight").spent.needs for step in (found.prefill, found.decode))
    assert output == once
    [attention, _] = [one.spent.needs for one in found.prefill.ops if one.kind == "attention"]
    assert attention.kv_bytes == (DEPTH + MAX_ROWS + DEPTH + PROMPT) * POSITION
    assert attention.products == 2 * 64 * sum(range(DEPTH + 1, DEPTH + PROMPT + 1))


@pytest.mark.night
def test_the_machine_was_measured(found: Profile) -> None:
    assert 1e8 < found.limits.read_bandwidth < 1e13
    assert 1e8 < found.limits.multiply_rate < 1e14
    assert (found.threads, found.kv_type) == (2, "q8_0")


def test_shares_are_of_the_limits() -> None:
    limits = SpeedLimits(read_bandwidth=100.0, multiply_rate=1000.0)
    read = Spent(2.0, 0.5, Needs(weight_bytes=90, kv_bytes=10, activation_bytes=1000, products=200), limits)
    assert (read.bytes_per_second, read.products_per_second) == (50.0, 100.0)
    assert (read.bandwidth_share, read.multiply_share) == (0.5, 0.1)
    multiplied = Spent(1.0, 0.0, Needs(weight_bytes=10, products=800), limits)
    assert (multiplied.bandwidth_share, multiplied.multiply_share) == (0.1, 0.8)
    neither = Spent(1.0, 0.0, Needs(activation_bytes=1000, float_products=10), limits)
    assert (neither.bandwidth_share, neither.multiply_share) == (0.0, 0.0)


def test_logits_inside_and_after_timed_steps_are_the_same_bits(path: Path) -> None:
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(context_size=512, threads=2))
    prompt = rows(0, 0, [5 + index % 90 for index in range(300)])

    def answered() -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        backend.kv.free(0)
        return [backend.forward(batch_of(prompt)).logits, backend.forward(batch_of(rows(0, 300, [7]))).logits]

    before = answered()
    with backend.timed() as team:
        inside = answered()
        assert len(team.taken_times()) == 3
    after = answered()
    backend.close()
    for first, second, third in zip(before, inside, after, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third)


@pytest.mark.night
def test_a_step_far_longer_than_the_time_is_taken_once(path: Path) -> None:
    found = profile(path, threads=2, prompt=1024, seconds=1e-4)
    assert found.prefill.repetitions == 1
    assert found.prefill.total.seconds > 0
    assert found.train_context == 2048


@pytest.mark.night
@pytest.mark.parametrize("depth", [1, 2, 40, 300])
def test_steps_after_recurrent_states_are_repeated(tmp_path: Path, depth: int) -> None:
    """The cache keeps less than `depth` tokens, because the state has passed that position."""
    found = profile(tiny_architecture(tmp_path, "qwen35"), threads=1, prompt=40, depth=depth, seconds=0.01)
    assert found.decode.repetitions > 0
    assert found.prefill.repetitions > 0
    assert {op.kind for op in found.decode.ops} >= {"convolution", "delta rule", "attention"}
