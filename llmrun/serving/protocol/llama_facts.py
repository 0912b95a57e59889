"""The answers of /props, /slots and /apply-template, with the fields of llama-server.

Clients learn neither prompts of others nor the paths of files.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypedDict

from llmrun.engine.requests import IMAGE_MARKER, ModelFacts
from llmrun.serving.protocol.llama_server import sampling_settings
from llmrun.serving.protocol.openai.objects import NO_LIMIT, Count

_RANDOM_SEED: Final = -1


class _Defaults(TypedDict):
    params: Annotated[dict[str, Any], "The sampling parameters of requests that set none."]
    n_ctx: Annotated[Count, "The size of the context of one request, in tokens."]


class _Modalities(TypedDict):
    vision: bool
    audio: bool


class Props(TypedDict):
    """The properties of a model and of the server."""

    default_generation_settings: _Defaults
    total_slots: Count
    model_alias: str
    model_path: Annotated[str, "The name of the model, because clients must not learn its path."]
    model_ftype: str
    modalities: _Modalities
    media_marker: Annotated[str, "Stands for an image in `prompt_string` of /completion."]
    chat_template: Annotated[str, "The source of the chat template, or an empty string if the model has none."]
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    is_sleeping: bool


class Slot(TypedDict):
    """A slot for a running request."""

    id: Count
    n_ctx: Count
    is_processing: bool


class RenderedPrompt(TypedDict):
    """The text of a conversation's prompt, without a BOS that the vocabulary adds."""

    prompt: str


def props_body(facts: ModelFacts, version: str) -> Props:
    """Return the answer of /props. `version` is llmrun's version."""
    params = sampling_settings(facts.default_sampling, NO_LIMIT)
    return {
        "default_generation_settings": {"params": {**params, "seed": _RANDOM_SEED}, "n_ctx": facts.info.context_size},
        "total_slots": facts.info.max_sequences,
        "model_alias": facts.name,
        "model_path": facts.name,
        "model_ftype": facts.info.file_type,
        "modalities": {"vision": facts.sees_images, "audio": False},
        "media_marker": IMAGE_MARKER,
        "chat_template": facts.chat_template or "",
        "bos_token": facts.bos_token or "",
        "eos_token": facts.eos_token or "",
        "build_info": f"llmrun-{version}",
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "is_sleeping": False,
    }


def slots_body(facts: ModelFacts, running: int) -> list[Slot]:
    """Return the answer of /slots for this number of running requests."""
    n_ctx = facts.info.context_size
    return [{"id": slot, "n_ctx": n_ctx, "is_processing": slot < running} for slot in range(facts.info.max_sequences)]
