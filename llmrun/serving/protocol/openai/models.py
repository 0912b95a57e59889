"""Writes the list of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.remote.listed_models import OWNER
from llmrun.options.sampling_params import SAMPLING

# In the year 9999; not the last day, which other time zones could not show.
FOREVER_S: Final = 253_370_764_800.0


def created_of(model: Mapping[str, Any]) -> int:
    """Return the Unix time in an entry of /v1/models, or 0 if another server gives none that is valid."""
    created = model.get("created")
    return created if type(created) is int and 0 <= created < FOREVER_S else 0


def models_body(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of /v1/models, from the bodies of the models."""
    return {"object": "list", "data": [*models]}


def unloaded_model_body(name: str, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/{id} for a model that is not loaded. `created` is a Unix time in seconds."""
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


def model_body(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/{id} for a loaded model.

    `max_model_len` is vLLM's name for the size of the context. The last three fields are llmrun's own. Servers that
    agree in them and in the context give the same answers.
    """
    sampling = {name: getattr(facts.default_sampling, name) for name in SAMPLING}
    return {
        **unloaded_model_body(facts.name, created),
        "max_model_len": facts.info.context_size,
        "system_fingerprint": facts.fingerprint,
        "default_sampling": sampling,
        "batch_invariant": facts.info.batch_invariant,
    }
