"""Writes the list of models."""

from __future__ import annotations

from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.sampling_params import SAMPLING

OWNER: Final = "llmrun"


def models_body(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return the body of /v1/models. `created` is a Unix time in seconds."""
    return {"object": "list", "data": [model_body(facts, created)]}


def model_body(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/{id}. `max_model_len` is vLLM's name for the size of the context.

    The last three fields are llmrun's own. Servers that agree in them and in the context give the same answers.
    """
    sampling = {name: getattr(facts.default_sampling, name) for name in SAMPLING}
    return {
        "id": facts.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": facts.info.context_size,
        "system_fingerprint": facts.fingerprint,
        "default_sampling": sampling,
        "batch_invariant": facts.info.batch_invariant,
    }
