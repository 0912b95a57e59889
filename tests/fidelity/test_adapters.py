"""Compare SmolLM2's predictions with a LoRA adapter with llama.cpp's, as test_real_model.py does without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.downloads import smollm2
from tests.support.models.fidelity import ENGINE_FLOOR, ENGINE_RATIO, LlmrunModel, divergences
from tests.support.models.prompts import prompts
from tests.support.models.real_weights import real_weights
from tests.support.models.tiny_adapters import AdaptedOracle, tiny_adapter
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

pytestmark = pytest.mark.push


SCALE = 0.5


@pytest.mark.night
def test_the_engine_is_as_close_to_the_oracle_as_llama_cpp(tmp_path: Path) -> None:
    """The adapter changes the predictions several times as much as the rounding of activations."""
    files = real_weights("Q4_1", tmp_path)
    adapter = tiny_adapter(tmp_path / "a.gguf", smollm2(), rank=16, alpha=4.0)
    asked = prompts(LlamaVocabulary(smollm2()), 64)[:16]
    with (
        AdaptedOracle(files.dequantized, [(adapter, SCALE)]) as oracle,
        AdaptedOracle(files.path, [(adapter, SCALE)], kv_type="f16") as theirs,
        LlmrunModel(files.path, adapters=[f"{adapter}:{SCALE}"]) as ours,
        LlmrunModel(files.path) as without,
    ):
        models = {"ours": ours.logits, "theirs": theirs.logits, "without": without.logits}
        measured = divergences(oracle.logits, models, asked)
    engine, llama_cpp = measured["ours"], measured["theirs"]
    assert engine.mean <= max(ENGINE_RATIO * llama_cpp.mean, ENGINE_FLOOR), (engine.mean, llama_cpp.mean)
    assert measured["without"].mean >= 5 * engine.mean
