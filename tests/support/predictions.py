"""What is asked of a model in design.md's steps: the twin and the engine predict what llama.cpp predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.fidelity import ENGINE_FLOOR, ENGINE_RATIO, TWIN_BOUND, LlmrunModel, divergences, exact_twin, plan_of
from tests.support.llama_cpp_oracle import LlamaCppModel, requantize

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, PROMPT_TOKENS = 8, 100


def check_predictions(path: Path, tmp_path: Path, *, twin_bound: float = TWIN_BOUND) -> None:
    dequantized = requantize(path, tmp_path / "dequantized.gguf", "F32")
    random = np.random.default_rng(0)
    with (
        LlamaCppModel.oracle(dequantized) as oracle,
        LlamaCppModel(path, kv_type="F16", flash_attention=False) as theirs,
        LlmrunModel(path) as ours,
    ):
        prompts = random.integers(3, oracle.vocabulary_size, (PROMPTS, PROMPT_TOKENS)).tolist()
        models = {"twin": exact_twin(plan_of(path)), "ours": ours.logits, "theirs": theirs.logits}
        measured = {name: divergence.mean for name, divergence in divergences(oracle.logits, models, prompts).items()}
    assert measured["twin"] <= twin_bound
    assert measured["ours"] <= max(ENGINE_RATIO * measured["theirs"], ENGINE_FLOOR), measured
