"""Writes the list of models."""

from __future__ import annotations

from typing import Any

from llmrun.engine.facts import ModelFacts


def models_body(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return the body of /v1/models. `created` is a Unix time in seconds."""
    return {"object": "list", "data": [model_body(facts, created)]}


def model_body(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/{id}. `max_model_len` is vLLM's name for the size of the context."""
    return {
        "id": facts.name,
        "object": "model",
        "created": created,
        "owned_by": "llmrun",
        "max_model_len": facts.info.context_size,
    }
