"""Check that the NumPy twin and the engine predict what llama.cpp predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.models.fidelity import (
    ENGINE_FLOOR,
    ENGINE_RATIO,
    TWIN_BOUND,
    LlmrunModel,
    divergences_of_positions,
    exact_twin,
    plan_of,
)
from tests.support.models.llama_cpp_oracle import LlamaCppModel, requantize

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS, PROMPT_TOKENS = 8, 100


def check_predictions(path: Path, tmp_path: Path, *, twin_bound: float = TWIN_BOUND, of_experts: bool = False) -> None:
    """Check the divergences of the twin and the engine on random prompts against their bounds.

    With `of_experts`, the median over positions is used for the engine instead of the mean. Rounding routes a few of a
    hundred rows to other experts, in llama.cpp as in our engine, and these rows diverge a hundred times as much as the
    others, so they would dominate the mean.
    """
    dequantized = requantize(path, tmp_path / "dequantized.gguf", "F32")
    random = np.random.default_rng(0)
    with (
        LlamaCppModel.oracle(dequantized) as oracle,
        LlamaCppModel(path, kv_type="f16", flash_attention=False) as theirs,
        LlmrunModel(path) as ours,
    ):
        prompts = random.integers(3, oracle.vocabulary_size, (PROMPTS, PROMPT_TOKENS)).tolist()
        models = {"twin": exact_twin(plan_of(path)), "ours": ours.logits, "theirs": theirs.logits}
        found = divergences_of_positions(oracle.logits, models, prompts)
    measured = {name: float(np.median(values) if of_experts else values.mean()) for name, values in found.items()}
    assert found["twin"].mean() <= twin_bound
    assert measured["ours"] <= max(ENGINE_RATIO * measured["theirs"], ENGINE_FLOOR), measured
