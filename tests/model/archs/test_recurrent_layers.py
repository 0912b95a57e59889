"""Tests of gated delta nets and Mamba layers: files that are refused, and how files determine the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.base.errors import BadGGUF, LlmrunError, UnsupportedModel
from llmrun.model.plan import reference
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.experts import Gating, Route
from llmrun.model.plan.ops.recurrences import DeltaRule, SelectiveScan, Ssd
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import ConvolutionState, MatrixState
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.models.tiny_models import changed_copy

QWEN, QWEN_AHEAD, NEXT = "qwen35", "qwen35 layers by name, with a layer ahead", "qwen3next"
GRANITE, NEMOTRON, MOE, FALCON = "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"
JAMBA = "jamba"


def changed(folder: Path, name: str, **values: Any) -> Path:
    architecture = TINY_ARCHITECTURES[name].architecture

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}

    return changed_copy(tiny_architecture(folder, name), folder / "changed.gguf", change)


def kinds_of(plan: Plan) -> list[str]:
    return [type(op).__name__ for op in plan.ops if isinstance(op, Attention | DeltaRule | Ssd | SelectiveScan)]


def sections(*sizes: int) -> np.ndarray[Any, Any]:
    return np.array(sizes, np.int32)


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "values", "error", "words"),
    [
        (QWEN, {"ssm__time_step_rank": 3}, BadGGUF, "ssm.group_count: must be a divisor of 3, the number of heads"),
        (QWEN, {"ssm__time_step_rank": 1025}, BadGGUF, "ssm.time_step_rank: must be at most 1024, not 1025"),
        (QWEN, {"ssm__group_count": 5}, BadGGUF, "ssm.group_count: must be at most 4, not 5"),
        (
            QWEN,
            {"ssm__inner_size": 66},
            BadGGUF,
            "ssm.inner_size: must be a multiple of 4, the number of heads, not 66",
        ),
        (QWEN, {"ssm__inner_size": 96}, UnsupportedModel, "recurrent heads of 24 features"),
        (QWEN, {"ssm__inner_size": 8192}, UnsupportedModel, "recurrent heads of 2048 features"),
        (
            QWEN,
            {"ssm__inner_size": 128},
            BadGGUF,
            "ssm.inner_size: must be 64, the heads times the state size, not 128",
        ),
        (JAMBA, {"ssm__state_size": 24}, UnsupportedModel, "ssm.state_size must be a multiple of 16, not 24"),
        (JAMBA, {"ssm__inner_size": 120}, UnsupportedModel, "ssm.inner_size must be a multiple of 16, not 120"),
        (JAMBA, {"ssm__inner_size": 256}, BadGGUF, "ssm_in.weight: must be 64 x 512"),
        (JAMBA, {"ssm__time_step_rank": 0}, BadGGUF, "ssm.time_step_rank: must be at least 1, not 0"),
        (JAMBA, {"ssm__conv_kernel": 17}, UnsupportedModel, "a convolution over 17 positions"),
        (QWEN, {"ssm__state_size": 24}, UnsupportedModel, "ssm.state_size must be a multiple of 16, not 24"),
        (QWEN, {"ssm__state_size": 2048}, BadGGUF, "ssm.state_size: must be at most 1024, not 2048"),
        (QWEN, {"ssm__conv_kernel": 1}, UnsupportedModel, "a convolution over 1 positions"),
        (QWEN, {"ssm__conv_kernel": 17}, UnsupportedModel, "a convolution over 17 positions"),
        (QWEN, {"ssm__conv_kernel": 3}, BadGGUF, "ssm_conv1d.weight: must be 3 x 128"),
        (QWEN, {"full_attention_interval": 0}, BadGGUF, "full_attention_interval: must be at least 1, not 0"),
        (QWEN, {"full_attention_interval": 2}, BadGGUF, "tensor missing"),
        (QWEN, {"expert_count": 4, "expert_used_count": 2}, UnsupportedModel, "a mixture of 4 experts"),
        (
            QWEN,
            {"rope__dimension_sections": sections(8, 0, 0, 0)},
            UnsupportedModel,
            "dimension_sections of 8, 0, 0, 0",
        ),
        (
            QWEN,
            {"rope__dimension_sections": sections(2, 2, 2, 2)},
            UnsupportedModel,
            "dimension_sections of 2, 2, 2, 2",
        ),
        (QWEN, {"rope__dimension_sections": sections(3, 3, 2)}, BadGGUF, "must have 4 values, not 3"),
        (QWEN, {"rope__dimension_sections": sections(0, 0, 0, 8)}, BadGGUF, "must have a sum of 1 to 32"),
        (QWEN, {"rope__dimension_sections": sections(11, 11, 11, 0)}, BadGGUF, "must have a sum of 1 to 32, not 33"),
        (QWEN, {"rope__dimension_sections": sections(3, 3, -1, 0)}, BadGGUF, "must be 0 to 32, not -1"),
        (QWEN_AHEAD, {"attention__recurrent_layers": np.array([True])}, BadGGUF, "must have 4 values"),
        (QWEN_AHEAD, {"nextn_predict_layers": 4}, BadGGUF, "nextn_predict_layers: must be at most 3, not 4"),
        (NEXT, {"expert_used_count": 9}, BadGGUF, "expert_used_count"),
        (NEXT, {"expert_shared_feed_forward_length": 32}, BadGGUF, "shexp.weight: must be 64 x 32"),
        (GRANITE, {"attention__head_count_kv": sections(0, 0, 2, 1)}, UnsupportedModel, "different values"),
        (GRANITE, {"ssm__group_count": 4}, BadGGUF, "ssm_in.weight"),
        (NEMOTRON, {"feed_forward_length": sections(0, 96, 0)}, BadGGUF, "must have 5 values"),
        (NEMOTRON, {"feed_forward_length": sections(0, 96, 0, 0, -1)}, BadGGUF, "must be 0 to 1048576, not -1"),
        (MOE, {"expert_used_count": sections(0, 3, 0, 0, 2)}, UnsupportedModel, "different values"),
        (MOE, {"expert_feed_forward_length": sections(0, 32, 0, 0, 48)}, UnsupportedModel, "different values"),
        (MOE, {"moe_latent_size": 32}, BadGGUF, "tensor missing: .*ffn_latent_down"),
        (FALCON, {"expert_count": 4, "expert_used_count": 2}, UnsupportedModel, "a mixture of 4 experts"),
    ],
)
def test_files_that_cannot_run_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any], error: type[LlmrunError], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        plan_of(changed(tmp_path, name, **values))
    assert type(refused.value) is error


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (QWEN, ["DeltaRule", "DeltaRule", "Attention", "DeltaRule"]),
        (QWEN_AHEAD, ["DeltaRule", "Attention", "DeltaRule"]),
        (NEXT, ["DeltaRule", "DeltaRule", "DeltaRule", "Attention", "DeltaRule"]),
        (GRANITE, ["Ssd", "Ssd", "Attention", "Ssd"]),
        (NEMOTRON, ["Ssd", "Attention", "Ssd"]),
        (JAMBA, ["SelectiveScan", "SelectiveScan", "Attention", "Attention"]),
        (FALCON, ["Attention", "Ssd", "Attention", "Ssd"]),
    ],
)
def test_the_file_determines_the_kind_of_each_layer(tmp_path: Path, name: str, kinds: list[str]) -> None:
    plan = plan_of(tiny_architecture(tmp_path, name))
    assert kinds_of(plan) == kinds
    recurrent = len(kinds) - kinds.count("Attention")
    assert [group.layers for group in plan.states] == [recurrent, recurrent]
    assert [group.layers for group in plan.groups] == [kinds.count("Attention")]


def test_a_single_value_applies_to_all_layers(tmp_path: Path) -> None:
    """llama.cpp, too, applies a single value of `recurrent_layers` to all layers."""
    with pytest.raises(BadGGUF, match=r"tensor missing: .*blk\.2\.attn_qkv"):
        plan_of(changed(tmp_path, QWEN, attention__recurrent_layers=True))


def test_heads_share_key_heads_as_in_each_architecture(tmp_path: Path) -> None:
    """In Qwen3.5, key heads take turns. In Qwen3-Next, consecutive heads share one."""
    rules = {
        name: next(op for op in plan_of(tiny_architecture(tmp_path, name)).ops if isinstance(op, DeltaRule))
        for name in (QWEN, "qwen35moe", NEXT)
    }
    assert {name: rule.shared for name, rule in rules.items()} == {QWEN: 1, "qwen35moe": 1, NEXT: 2}


def test_convolutions_and_matrices_have_states_of_their_own(tmp_path: Path) -> None:
    delta, mamba = plan_of(tiny_architecture(tmp_path, QWEN)), plan_of(tiny_architecture(tmp_path, GRANITE))
    assert [group.shape for group in delta.states] == [ConvolutionState(128, 4), MatrixState(4, 2, 16, 16, gates=2)]
    assert [group.shape for group in mamba.states] == [ConvolutionState(192, 4), MatrixState(4, 2, 16, 32, gates=1)]


@pytest.mark.parametrize(
    "name", [QWEN_AHEAD, "qwen35moe fused, with a layer ahead", "nemotron_h_moe Super, with a layer ahead"]
)
def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path, name: str) -> None:
    last = TINY_ARCHITECTURES[name].layers - 1
    plan = plan_of(tiny_architecture(tmp_path, name))
    assert not any(matrix.name.startswith(f"blk.{last}.") for matrix in plan.matrices)
    with pytest.raises((BadGGUF, UnsupportedModel), match=rf"blk\.{last}\."):
        plan_of(changed(tmp_path, name, nextn_predict_layers=0))


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_mixtures_of_experts_need_no_dense_feed_forward_size(tmp_path: Path, name: str) -> None:
    """The configs of some published models have no `intermediate_size`."""
    tokens = np.arange(3, 23, dtype=np.int32)
    expected = reference.exact(plan_of(tiny_architecture(tmp_path, name)), tokens)
    (tmp_path / "without").mkdir()
    without = tiny_architecture(tmp_path / "without", name, without="feed_forward_length")
    np.testing.assert_array_equal(reference.exact(plan_of(without), tokens), expected)


def test_nemotron_routes_with_sigmoid_gating(tmp_path: Path) -> None:
    route = next(op for op in plan_of(tiny_architecture(tmp_path, MOE)).ops if isinstance(op, Route))
    assert (route.gating, route.normalized, route.scale) == (Gating.SIGMOID, True, 2.5)
    assert route.selection_bias is not None


def test_the_rmsnorm_epsilon_takes_precedence(tmp_path: Path) -> None:
    """Files of nemotron_h may have the epsilons of both RMSNorm and LayerNorm."""
    plan = plan_of(changed(tmp_path, NEMOTRON, attention__layer_norm_rms_epsilon=1e-3))
    assert epsilons_of(plan) == {1e-3}
    assert epsilons_of(plan_of(tiny_architecture(tmp_path, NEMOTRON))) == {1e-5}


def epsilons_of(plan: Plan) -> set[float]:
    return {round(op.epsilon, 9) for op in plan.ops if hasattr(op, "epsilon")}
