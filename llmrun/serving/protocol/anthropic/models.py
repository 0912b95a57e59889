"""Writes the list of models in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from llmrun.serving.protocol.openai.models import created_of

VERSION_HEADER: Final = "anthropic-version"  # only Anthropic's clients send it, with every request


def anthropic_models(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of OpenAI's /v1/models. All models are on one page."""
    models = [anthropic_model(each) for each in body["data"]]
    ids = [model["id"] for model in models]
    return {"data": models, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def anthropic_model(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of OpenAI's /v1/models/{id}."""
    context = body.get("max_model_len")  # known only for loaded models
    return {
        "type": "model",
        "id": body["id"],
        "display_name": body["id"],
        "created_at": datetime.fromtimestamp(created_of(body), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
