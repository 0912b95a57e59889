"""Tests of architectures with experts or short convolutions: what they refuse, and the plans they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.errors import BadGGUF, LlmrunError, UnsupportedModel
from llmrun.model.plan import reference
from llmrun.model.plan.elementary import sigmoid_reference, softmax_reference
from llmrun.model.plan.ops import experts
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.convolution import Convolve
from llmrun.model.plan.ops.experts import (
    ExpertGroups,
    ExpertLinear,
    Gating,
    Route,
    group_scores_reference,
    routed_reference,
)
from llmrun.model.plan.plan import Plan
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_models import Change, changed_copy


def changed(folder: Path, name: str, change: Change) -> Plan:
    return plan_of(changed_copy(tiny_architecture(folder, name), folder / "changed.gguf", change))


def with_metadata(**values: Any) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata |= {f"{metadata['general.architecture']}.{key}": value for key, value in values.items()}

    return change


GROUPS = {"expert_group_count": 4, "expert_group_used_count": 1}


@pytest.mark.parametrize(
    ("name", "values", "error", "words"),
    [
        ("qwen3moe", GROUPS, BadGGUF, "expert_group_used_count: 1 of 4 groups have fewer than 3 experts"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 2}, UnsupportedModel, "interleave_moe_layer_step of 2"),
        ("dots1", {"expert_gating_func": 0}, UnsupportedModel, "a dots1.expert_gating_func of 0"),
        (
            "glm4moe GLM-4.5V, text",
            {"rope.dimension_sections": np.array([1, 1, 1, 1], np.int32)},
            UnsupportedModel,
            "rope.dimension_sections of 1, 1, 1, 1",
        ),
        (
            "glm4moe GLM-4.5V, text",
            {"rope.dimension_sections": np.array([4, 0, 0, 0], np.int32)},
            UnsupportedModel,
            "rope.dimension_sections of 4, 0, 0, 0",
        ),
        ("glm4moe", {"expert_gating_func": 3}, UnsupportedModel, "a glm4moe.expert_gating_func of 3"),
        ("lfm2moe", {"expert_gating_func": 4}, UnsupportedModel, "a lfm2moe.expert_gating_func of 4"),
        ("lfm2moe", {"expert_gating_func": "softmax"}, BadGGUF, "lfm2moe.expert_gating_func"),
        (
            "qwen3moe",
            {"expert_used_count": np.array([3, 2], np.uint32)},
            UnsupportedModel,
            "different values of qwen3moe.expert_used_count",
        ),
        ("gpt-oss", {"expert_feed_forward_length": 0}, BadGGUF, "gpt-oss.expert_feed_forward_length"),
        ("deepseek", {"expert_shared_count": 0}, BadGGUF, "deepseek.expert_shared_count"),
        (
            "qwen3moe",
            {"expert_count": 4},
            BadGGUF,
            "ffn_gate_inp.weight: must be 64 x 4 according to the metadata, not 64 x 8",
        ),
        (
            "qwen3moe",
            {"expert_feed_forward_length": 48},
            BadGGUF,
            "ffn_gate_exps.weight: must be 64 x 48 x 8 according",
        ),
        ("deepseek", {"leading_dense_block_count": 2}, BadGGUF, "tensor missing"),
    ],
)
def test_experts_that_cannot_be_run_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any], error: type[LlmrunError], words: str
) -> None:
    with pytest.raises(error) as refused:
        changed(tmp_path, name, with_metadata(**values))
    assert type(refused.value) is error
    assert words in str(refused.value)


def test_experts_of_no_whole_groups_of_rows_are_left_to_llama_cpp(tmp_path: Path) -> None:
    """Kernels read 16 rows of one matrix together, and those rows must not belong to two experts."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["qwen3moe.expert_feed_forward_length"] = 24
        tensors["blk.0.ffn_gate_exps.weight"] = ("F32", np.zeros((8, 24, 64), np.float32))

    with pytest.raises(UnsupportedModel, match="the outputs of an expert must be a multiple of 16, not 24") as refused:
        changed(tmp_path, "qwen3moe", change)
    assert refused.value.hint == "This model may run with --backend llama."


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        ([0, 2, 0, 1], UnsupportedModel, "different values of lfm2.attention.head_count_kv"),
        ([0, 2, 0], BadGGUF, "must have 4 values, one for each layer, not 3"),
        ([0, 3, 0, 3], BadGGUF, "must be a divisor of 4, the number of heads, not 3"),
        ([0, -1, 0, -1], BadGGUF, "must be 0 to 1024, not -1"),
        ([0, 2, 2, 2], BadGGUF, "tensor missing: .*attn_q_norm|tensor missing"),
    ],
)
def test_layers_that_are_neither_are_refused(
    tmp_path: Path, counts: list[int], error: type[LlmrunError], words: str
) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["lfm2.attention.head_count_kv"] = np.array(counts, np.int32)

    with pytest.raises(error, match=words) as refused:
        changed(tmp_path, "lfm2 window", change)
    assert type(refused.value) is error


@pytest.mark.parametrize("taps", [0, 1, 65])
def test_a_convolution_of_no_or_absurdly_many_taps_is_refused(tmp_path: Path, taps: int) -> None:
    with pytest.raises(BadGGUF, match=r"lfm2\.shortconv\.l_cache"):
        changed(tmp_path, "lfm2", with_metadata(**{"shortconv.l_cache": taps}))


ROUTED = ["llama Mixtral", "qwen2moe", "gpt-oss", "granitemoe", "deepseek", "lfm2moe", "qwen35moe", "deepseek2 V3"]
ROUTED += ["glm4moe", "dots1", "bailingmoe2", "ernie4_5-moe", "minimax-m2"]


@pytest.mark.push
def test_a_plan_sends_rows_as_the_file_says(tmp_path: Path) -> None:
    routes = {
        name: next(op for op in plan_of(tiny_architecture(tmp_path, name)).ops if isinstance(op, Route))
        for name in ROUTED
    }
    seen = {
        name: (route.routing.experts, route.routing.used, route.gating, route.normalized, round(route.scale, 6))
        for name, route in routes.items()
    }
    assert seen == {
        "llama Mixtral": (4, 2, Gating.SOFTMAX, True, 1.0),
        "qwen2moe": (8, 3, Gating.SOFTMAX, False, 1.0),
        "gpt-oss": (8, 3, Gating.SOFTMAX_OF_CHOSEN, False, 1.0),
        "granitemoe": (8, 3, Gating.SOFTMAX, True, 0.22),
        "deepseek": (8, 3, Gating.SOFTMAX, False, 1.5),
        "lfm2moe": (8, 3, Gating.SIGMOID, True, 1.0),
        "qwen35moe": (8, 3, Gating.SOFTMAX, True, 1.0),
        "deepseek2 V3": (8, 3, Gating.SIGMOID, True, 1.8),
        "glm4moe": (8, 3, Gating.SIGMOID, True, 1.8),
        "dots1": (8, 3, Gating.SIGMOID, True, 1.8),
        "bailingmoe2": (8, 3, Gating.SIGMOID, True, 1.8),
        "ernie4_5-moe": (8, 3, Gating.SOFTMAX, True, 1.0),
        "minimax-m2": (8, 3, Gating.SIGMOID, True, 1.0),
    }
    biased = ["lfm2moe", "deepseek2 V3", "glm4moe", "dots1", "bailingmoe2", "ernie4_5-moe", "minimax-m2"]
    assert [name for name, route in routes.items() if route.selection_bias is not None] == biased
    grouped = {name: route.groups for name, route in routes.items() if route.groups is not None}
    assert grouped == dict.fromkeys(("deepseek2 V3", "bailingmoe2"), ExpertGroups(4, 2))


def test_layers_before_the_first_with_experts_have_none(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "deepseek"))
    assert sum(isinstance(op, Route) for op in plan.ops) == 2
    assert sum(isinstance(op, ExpertLinear) for op in plan.ops) == 6
    assert sum(isinstance(op, Attention) for op in plan.ops) == 3


def test_only_layers_with_heads_of_keys_are_attention(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, "lfm2"))
    kinds = [type(op) for op in plan.ops if isinstance(op, Attention | Convolve)]
    assert kinds == [Convolve, Convolve, Attention, Convolve, Attention]
    assert [group.layers for group in plan.groups] == [3, 2]
    assert plan.windows == [3, 0]


@pytest.mark.push
@pytest.mark.parametrize("name", [name for name, row in TINY_ARCHITECTURES.items() if row.experts])
def test_no_position_of_a_tiny_model_is_near_other_experts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No routing decision in the tiny models is close; otherwise float16 keys could change it.

    The tests that compare logits would then fail without a bug. Measured decisions that flipped had margins within 2e-4
    of probability, so the margin must be 5e-4. A new row in the table needs a `seed` that satisfies this.
    """
    margins = []

    def margin(values: NDArray[np.float32], used: int) -> float:
        ranked = -np.sort(-values, axis=1)
        return float((ranked[:, used - 1] - ranked[:, used]).min())

    def routed(logits: NDArray[np.float32], op: Route) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ranked = sigmoid_reference(logits) if op.gating is Gating.SIGMOID else logits
        if op.selection_bias is not None:
            ranked = (ranked if op.gating is Gating.SIGMOID else softmax_reference(logits)) + op.selection_bias
        if op.groups is not None:
            scores = group_scores_reference(ranked, op.groups)
            margins.append(margin(scores, op.groups.used))
            worst_score = -np.sort(-scores, axis=1)[:, op.groups.used - 1, None]
            members = np.repeat(scores, op.routing.experts // op.groups.count, axis=1)
            ranked = np.where(members >= worst_score, ranked, np.float32(-np.inf))
        margins.append(margin(ranked, op.routing.used))
        return routed_reference(logits, op)

    monkeypatch.setattr(experts, "routed_reference", routed)
    tokens = np.random.default_rng(0).integers(3, 290, TINY_ARCHITECTURES[name].tokens)
    reference.exact(plan_of(tiny_architecture(tmp_path, name)), tokens.astype(np.int32))
    assert min(margins) > 5e-4
