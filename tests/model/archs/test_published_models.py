"""Tests that the headers of published models are accepted, with sizes far larger than those of the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.cpu.cache_size import footprint_on_cpu
from llmrun.hub.catalog import load_catalog
from llmrun.model.archs.parts.architecture import draft_plan_of_header, plan_of_header
from llmrun.model.archs.parts.tensors import parameter_count
from tests.support.engine.runs import logits_in_steps
from tests.support.models.attention_heads import heads_in
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.published_models import PUBLISHED_MODELS
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture


@pytest.mark.night
@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_models_can_be_planned(tmp_path: Path, name: str) -> None:
    model = PUBLISHED_MODELS[name]
    with model.header(tmp_path / "header.gguf") as file:
        assert parameter_count(file) / 1e9 == pytest.approx(model.parameters, rel=0.01)
        plan, head = plan_of_header(file), draft_plan_of_header(file)
        assert (head is not None) == model.ahead
        footprint = footprint_on_cpu(
            file, plan, head, max_sequences=1, context_size=4096, kv_type="f16", max_rows=256, n_threads=2
        )
    assert footprint.weights >= 2e9 * model.parameters * 0.98


@pytest.mark.night
@pytest.mark.parametrize(("name", "entry"), [("DeepSeek-V3", "deepseek-r1:671b"), ("Gemma-3n-E4B", "gemma3n:e4b")])
def test_heads_in_the_catalogue_are_those_of_the_plan(tmp_path: Path, name: str, entry: str) -> None:
    with PUBLISHED_MODELS[name].header(tmp_path / "header.gguf") as file:
        assert heads_in(file) == set(load_catalog().entry(entry).attention)


@pytest.mark.night
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5-Air", "ERNIE-4.5-21B-A3B"])
def test_heads_of_published_models_mean_what_llama_cpp_says(tmp_path: Path, name: str) -> None:
    """These models have 128, 12 and 5 query heads per KV head, and the tiny models two."""
    model = PUBLISHED_MODELS[name]
    row, tiny = model.row, TINY_ARCHITECTURES[model.form]
    keys = {key: row.keys[key] if key == "rope.dimension_count" else value for key, value in tiny.keys.items()}
    heads: dict[str, Any] = {
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "head_size": row.head_size,
        "latent": row.latent,
    }
    path = tiny_architecture(tmp_path, model.form, keys=keys, width=128, **heads)
    tokens = np.random.default_rng(0).integers(3, 290, 60).tolist()
    with LlamaCppModel.oracle(path) as oracle:
        expected = oracle.logits(tokens)
    actual = logits_in_steps(path, tokens, [58, 1, 1], threads=2)
    assert np.abs(actual - expected).max() <= 1e-3 * np.ptp(expected)
