"""Tests of LoRA adapters in plans, against llama.cpp with the same adapters."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.adapters import adapted
from llmrun.formats.gguf.adapter import EMBEDDING, open_adapter
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan import reference
from llmrun.model.plan.ops.adapters import AdapterOp
from llmrun.model.plan.ops.linear import Linear, Product
from llmrun.model.plan.plan import Plan
from tests.support.models.fidelity import plan_of
from tests.support.models.tiny_adapters import AdaptedOracle, scales_of, tiny_adapter
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

# Rows without GELU, which ggml takes from a float16 table: fused and separate matrices, biases, experts beside adapted
# matrices, latent attention, recurrent layers, short convolutions, and an output with a matrix of its own.
ROWS = [
    *("llama biases", "llama Mistral Nemo", "qwen3", "phi3", "phi3 separate, biases", "fused with three biases"),
    *("granite", "cohere2", "llama Mixtral", "deepseek2", "lfm2", "qwen35", "granitehybrid", "nemotron_h", "falcon-h1"),
]
SCALES = (0.5, 0.0, 1.0)


def tokens_of(name: str) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(3, 290, TINY_ARCHITECTURES[name].tokens).astype(np.int32)


def adapters_of(folder: Path, model: Path) -> list[Path]:
    """Write three adapters of different ranks, of which the second one has no alpha."""
    return [
        tiny_adapter(folder / "a.gguf", model, rank=4, seed=1),
        tiny_adapter(folder / "b.gguf", model, rank=6, seed=2, adapter__lora__alpha=None),
        tiny_adapter(folder / "c.gguf", model, rank=17, seed=3),
    ]


def adapted_plan(model: Path, adapters: list[Path]) -> Plan:
    """Return the plan of a model with adapters. All files stay open as long as their weights are referenced."""
    with open_gguf(model) as file:
        return adapted(plan_of(model), [open_adapter(path, file) for path in adapters])


@pytest.mark.push
@pytest.mark.parametrize("name", ROWS)
def test_the_twin_computes_what_llama_cpp_does(tmp_path: Path, name: str) -> None:
    """Allow 2e-5 of the logits' range (at most 5e-6 was measured). Without the adapters, they differ by a tenth."""
    model, tokens = tiny_architecture(tmp_path, name), tokens_of(name)
    adapters = adapters_of(tmp_path, model)
    with AdaptedOracle(model, [(adapters[0], 0.5), (adapters[2], 1.0)]) as oracle:
        expected = oracle.logits(tokens.tolist())
    plan = adapted_plan(model, adapters)
    with_them = reference.exact(plan, tokens, scales_of(len(tokens), *SCALES))
    assert np.abs(with_them - expected).max() <= 2e-5 * np.ptp(expected)
    assert np.abs(reference.exact(plan, tokens) - expected).max() >= 0.1 * np.ptp(expected)


def test_embeddings_and_outputs_are_adapted_as_in_llama_cpp(tmp_path: Path) -> None:
    model, tokens = tiny_architecture(tmp_path, "llama Mistral Nemo"), tokens_of("llama Mistral Nemo")
    for name in (EMBEDDING, "output.weight"):
        adapter = tiny_adapter(tmp_path / "a.gguf", model, names=[name])
        with AdaptedOracle(model, [(adapter, 0.5)]) as oracle:
            expected = oracle.logits(tokens.tolist())
        plan = adapted_plan(model, [adapter])
        with_it = reference.exact(plan, tokens, scales_of(len(tokens), 0.5))
        assert np.abs(with_it - expected).max() <= 2e-5 * np.ptp(expected)
        assert np.abs(reference.exact(plan, tokens) - expected).max() >= 0.05 * np.ptp(expected)


def test_rows_before_an_adapter_is_used_are_not_changed(tmp_path: Path) -> None:
    model, tokens = tiny_architecture(tmp_path, "qwen3"), tokens_of("qwen3")
    plan = adapted_plan(model, adapters_of(tmp_path, model))
    scales = scales_of(len(tokens), *SCALES)
    scales[:50] = 0
    logits = reference.exact(plan, tokens, scales)
    without = reference.exact(plan_of(model), tokens)
    np.testing.assert_array_equal(logits[:50], without[:50])
    assert (logits[50:] != without[50:]).any(axis=1).all()


@pytest.mark.push
def test_products_of_one_input_stay_together(tmp_path: Path) -> None:
    """No barrier separates queries, keys and values in a step without adapters."""
    model = tiny_architecture(tmp_path, "llama Mistral Nemo")
    plan = adapted_plan(model, adapters_of(tmp_path, model))
    ops = [op for op in plan.ops if not isinstance(op, AdapterOp)]
    assert [type(op) for op in ops] == [type(op) for op in plan_of(model).ops]
    followed = {id(op): plan.ops[index + 1] for index, op in enumerate(plan.ops[:-1])}
    pairs = [(op, following) for op, following in itertools.pairwise(ops) if isinstance(op, Linear)]
    neighbors = [(a, b) for a, b in pairs if isinstance(b, Product) and a.x is b.x]
    assert neighbors
    assert all(followed[id(a)] is b for a, b in neighbors)
