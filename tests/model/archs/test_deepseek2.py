"""Tests of latent attention: refused files, omitted keys, and numbers that no tiny model covers."""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import BadGGUF, LlmrunError, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.archs import deepseek2
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.experts import Gating, Route
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape
from tests.support.gguf.gguf_files import Tensor
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy

ABSORBED, FULL = "deepseek2", "deepseek2 V2 Lite, older"
AHEAD = "deepseek2 GLM-4.7-Flash, fused, with a layer ahead"


def changed(folder: Path, name: str, **values: Any) -> Path:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata |= {f"deepseek2.{key.replace('__', '.')}": value for key, value in values.items()}

    return changed_copy(tiny_architecture(folder, name), folder / "changed.gguf", change)


def attention_of(plan: Plan) -> Attention:
    return next(op for op in plan.ops if isinstance(op, Attention))


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "values", "error", "words"),
    [
        (ABSORBED, {"attention__temperature_scale": 0.1}, BadGGUF, "attention.temperature_length"),
        (ABSORBED, {"expert_group_count": 4, "expert_group_used_count": 1}, BadGGUF, "1 of 4 groups have fewer than 3"),
        (ABSORBED, {"expert_gating_func": 4}, UnsupportedModel, "a deepseek2.expert_gating_func of 4"),
        (ABSORBED, {"attention__kv_lora_rank": 24}, UnsupportedModel, "kv_lora_rank must be a multiple of 16, not 24"),
        (ABSORBED, {"rope__dimension_count": 96}, UnsupportedModel, "heads of 96 features with 96 rotated features"),
        (ABSORBED, {"rope__dimension_count": 90}, UnsupportedModel, "heads of 96 features with 90 rotated features"),
        (ABSORBED, {"attention__key_length": 48}, BadGGUF, "attention.key_length: must be 64, not 48"),
        (ABSORBED, {"attention__value_length": 48}, BadGGUF, "attention.value_length: must be 32, not 48"),
        (ABSORBED, {"attention__head_count_kv": 4}, BadGGUF, "attention.head_count_kv: must be 1, not 4"),
        (ABSORBED, {"attention__key_length_mla": 0}, BadGGUF, "attention.key_length_mla: must be at least 1, not 0"),
        (ABSORBED, {"rope__scaling__yarn_log_multiplier": -0.1}, BadGGUF, "must be 0 to 1, not -0.1"),
        (ABSORBED, {"rope__scaling__attn_factor": 1e9}, BadGGUF, "gives an attention scale of"),
        (ABSORBED, {"nextn_predict_layers": 3}, BadGGUF, "nextn_predict_layers: must be at most 2, not 3"),
        (ABSORBED, {"expert_shared_count": 0}, BadGGUF, "expert_shared_count"),
        (FULL, {"attention__head_count_kv": 2}, BadGGUF, "attention.head_count_kv: must be 4, not 2"),
        (FULL, {"attention__q_lora_rank": 32}, BadGGUF, "tensor missing"),
        (FULL, {"attention__key_length": 80}, BadGGUF, "attn_q.weight"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, name: str, values: dict[str, Any], error: type[LlmrunError], words: str
) -> None:
    with pytest.raises(error) as refused:
        plan_of(changed(tmp_path, name, **values))
    assert words in str(refused.value)


def test_layers_that_predict_further_ahead_are_left_out_and_no_others(tmp_path: Path) -> None:
    plan = plan_of(tiny_architecture(tmp_path, AHEAD))
    assert not any(matrix.name.startswith("blk.2.") for matrix in plan.matrices)
    with pytest.raises(UnsupportedModel, match=r"blk\.2\..*: not part of this architecture"):
        plan_of(changed(tmp_path, AHEAD, nextn_predict_layers=0, block_count=2))


def test_the_cache_of_absorbed_attention_is_of_one_head(tmp_path: Path) -> None:
    absorbed, full = (plan_of(tiny_architecture(tmp_path, name)) for name in (ABSORBED, FULL))
    assert [group.shape for group in absorbed.groups] == [AttentionShape(4, 1, 64, value_size=32)]
    assert [group.shape for group in full.groups] == [AttentionShape(4, 4, 64, value_size=32)]


@pytest.mark.parametrize(
    ("scaling", "scale", "magnitude"),
    [
        ({"type": "none"}, 1.0, 1.0),
        ({"type": "linear", "factor": 40.0}, 1 + 0.1 * log(40), 1.0),
        ({"type": "yarn", "factor": 40.0}, 1 + 0.1 * log(40), 1 + 0.1 * log(40)),
        ({"type": "yarn", "factor": 40.0, "yarn_log_multiplier": 0.0707}, 1 + 0.0707 * log(40), 1.0),
        ({"type": "yarn", "factor": 40.0, "yarn_log_multiplier": 0.1}, 1 + 0.1 * log(40), 1.0),
        ({"type": "yarn", "factor": 0.5}, 1.0, 1.0),
    ],
)
def test_scores_get_the_magnitude_twice_that_yarn_gives_to_queries_and_keys(
    tmp_path: Path, scaling: dict[str, Any], scale: float, magnitude: float
) -> None:
    """DeepSeek V2 Lite has a factor of 40 and a multiplier of 0.707, which files store divided by ten."""
    values = {f"rope__scaling__{key}": value for key, value in scaling.items()}
    plan = plan_of(changed(tmp_path, AHEAD, **{"rope__scaling__factor": 1.0, **values}))
    assert attention_of(plan).scale == pytest.approx(scale**2 / sqrt(96), rel=1e-6)
    assert plan.ropes[0].magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.push
@pytest.mark.parametrize(
    ("layers", "vocabulary", "gating"),
    [
        (48, 154880, Gating.SIGMOID),
        (47, 154880, Gating.SIGMOID),
        (46, 154880, Gating.SOFTMAX),
        (47, 154881, Gating.SOFTMAX),
    ],
)
def test_a_file_that_does_not_say_how_experts_are_weighed_is_known_by_its_size(
    tmp_path: Path, layers: int, vocabulary: int, gating: Gating
) -> None:
    """The first files of GLM-4.7-Flash lack the key."""
    path = tiny_architecture(tmp_path, FULL, layers=layers)
    path = changed_copy(path, tmp_path / "changed.gguf", lambda metadata, _: metadata.update(vocab(vocabulary)))
    routes = [op for op in plan_of(path).ops if isinstance(op, Route)]
    assert {op.gating for op in routes} == {gating}


def vocab(size: int) -> dict[str, Any]:
    return {"deepseek2.vocab_size": size}


def test_a_header_is_checked_before_any_weight_is_read(tmp_path: Path) -> None:
    with open_gguf(changed(tmp_path, ABSORBED, attention__q_lora_rank=0)) as file:
        assert deepseek2.read_config(file).query_latent == 0
        with pytest.raises(BadGGUF, match=r"tensor missing: .*blk\.0\.attn_q\.weight"):
            deepseek2.plan(file, deepseek2.read_config(file))
