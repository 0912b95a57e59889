"""Compare SmolLM2's predictions with llama.cpp's, in every weight type the CPU engine supports.

The oracle is llama.cpp on the same weights dequantized to F32, with an F32 KV cache and plain attention.
`scripts/fidelity` prints all measurements, on more text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.model.plan.elementary import Rope
from tests.support.models.downloads import smollm2
from tests.support.models.fidelity import (
    ENGINE_FLOOR,
    ENGINE_RATIO,
    PERPLEXITY_BOUND,
    TWIN_BOUND,
    WINDOW,
    LlmrunModel,
    divergences,
    exact_twin,
    perplexities,
    plan_of,
)
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.prompts import long_text, prompts
from tests.support.models.real_weights import RealWeights, real_weights
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

pytestmark = pytest.mark.push

# Number of prompts, and of positions compared in each. The downloaded file gets 50 prompts; types derived from it get
# fewer, and `scripts/fidelity` covers those fully. In Q4_0, one position (the first token "#!/", whose activations are
# huge) contributes a tenth of the sum over 64 positions: a change of 1e-6 in its activations moves the type's
# divergence between 0.4 and 1.9. So Q4_0 gets more positions than the others.
PROMPTS = {"Q4_1": (50, 64), "Q4_0": (16, 384), "Q8_0": (16, 64), "F16": (12, 64), "F32": (12, 64)}
TWIN_PROMPTS = 2  # per weight type: 640 positions in all, each compared over all its logits


@pytest.fixture(scope="module")
def vocabulary() -> LlamaVocabulary:
    return LlamaVocabulary(smollm2())


TYPES = [pytest.param(name, marks=pytest.mark.push if name == "Q8_0" else pytest.mark.night) for name in PROMPTS]


@pytest.fixture(scope="module", params=TYPES)
def weights(request: pytest.FixtureRequest) -> Iterator[tuple[str, RealWeights]]:
    """Yield one weight type at a time. Its files are deleted afterwards; pytest would keep those of three runs."""
    with tempfile.TemporaryDirectory(prefix="llmrun-fidelity-") as folder:
        yield request.param, real_weights(request.param, Path(folder))


@pytest.mark.night
def test_the_twin_without_rounding_is_the_oracle(weights: tuple[str, RealWeights], vocabulary: LlamaVocabulary) -> None:
    _, files = weights
    twin = exact_twin(plan_of(files.path))
    with LlamaCppModel.oracle(files.dequantized) as oracle:
        measured = divergences(oracle.logits, {"twin": twin}, prompts(vocabulary, 64)[:TWIN_PROMPTS])
    assert measured["twin"].mean <= TWIN_BOUND


def test_the_engine_is_as_close_to_the_oracle_as_llama_cpp(
    weights: tuple[str, RealWeights], vocabulary: LlamaVocabulary
) -> None:
    weight_type, files = weights
    n_prompts, n_tokens = PROMPTS[weight_type]
    asked = prompts(vocabulary, n_tokens)[:n_prompts]
    with (
        LlamaCppModel.oracle(files.dequantized) as oracle,
        LlamaCppModel(files.path, kv_type="f16", flash_attention=False) as theirs,
        LlmrunModel(files.path) as ours,
    ):
        measured = divergences(oracle.logits, {"ours": ours.logits, "theirs": theirs.logits}, asked)
    engine, llama_cpp = measured["ours"], measured["theirs"]
    assert engine.mean <= max(ENGINE_RATIO * llama_cpp.mean, ENGINE_FLOOR), (
        f"{engine.mean:.2e} nats, llama.cpp {llama_cpp.mean:.2e}, ratio in {engine.ratio_interval(llama_cpp)}"
    )


@pytest.mark.night
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("weights", ["F32"], indirect=True)
def test_a_rounded_cache_costs_no_more_than_llama_cpps(
    weights: tuple[str, RealWeights], vocabulary: LlamaVocabulary, kv_type: str
) -> None:
    """Use float32 weights, so that only the cache is rounded.

    A float16 cache costs about 1e-5 nats, which is too little to pass the lower bound.
    """
    _, files = weights
    n_prompts, n_tokens = PROMPTS["F32"]
    with (
        LlamaCppModel.oracle(files.dequantized) as oracle,
        LlamaCppModel(files.path, kv_type=kv_type, flash_attention=True) as theirs,
        LlmrunModel(files.path, kv_type) as ours,
    ):
        models = {"ours": ours.logits, "theirs": theirs.logits}
        measured = divergences(oracle.logits, models, prompts(vocabulary, n_tokens)[:n_prompts])
    engine, llama_cpp = measured["ours"], measured["theirs"]
    assert ENGINE_FLOOR < engine.mean <= ENGINE_RATIO * llama_cpp.mean, (
        f"{engine.mean:.2e} nats, llama.cpp {llama_cpp.mean:.2e}, ratio in {engine.ratio_interval(llama_cpp)}"
    )


@pytest.mark.night
def test_the_perplexity_is_llama_cpps(vocabulary: LlamaVocabulary) -> None:
    text = long_text(vocabulary)[: 8 * WINDOW]
    with (
        LlamaCppModel(smollm2(), kv_type="f16", flash_attention=False) as theirs,
        LlmrunModel(smollm2()) as ours,
    ):
        measured = perplexities({"theirs": theirs.logits, "ours": ours.logits}, text)
    assert measured["ours"].predicted >= 4000
    assert measured["ours"].value == pytest.approx(measured["theirs"].value, rel=PERPLEXITY_BOUND)


@pytest.mark.night
@pytest.mark.parametrize("weights", ["Q4_1"], indirect=True)
def test_the_oracle_sees_rotations_off_by_a_thousandth(
    weights: tuple[str, RealWeights], vocabulary: LlamaVocabulary
) -> None:
    """Show that even a small mistake exceeds the bound on the twin."""
    _, files = weights
    plan = plan_of(files.path)
    [rope] = plan.ropes
    wrong = exact_twin(replace(plan, ropes=[Rope(1.001 * rope.frequencies)]))
    with LlamaCppModel.oracle(files.dequantized) as oracle:
        measured = divergences(oracle.logits, {"wrong": wrong}, prompts(vocabulary, 64)[:1])
    assert measured["wrong"].mean > 10 * TWIN_BOUND
