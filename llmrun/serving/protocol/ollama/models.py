"""Writes the answers of Ollama's API about models: /api/tags, /api/ps, /api/show and /api/version."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmrun.base.amounts import format_weights
from llmrun.base.types import named_pooling
from llmrun.engine.facts import ModelFacts
from llmrun.serving.protocol.fields import Fields, agreed, missing
from llmrun.serving.protocol.ollama.answers import timestamp
from llmrun.serving.protocol.openai.models import FOREVER_S, created_of

# Many programs require a minimum version, such as VS Code 0.6.4. This is the version of Ollama whose API this is.
API_VERSION: Final = "0.32.8"
_FORMAT: Final = "gguf"
_COMPLETION, _EMBEDDING, _TOOLS, _THINKING, _FILLING = "completion", "embedding", "tools", "thinking", "insert"
_CONTEXT: Final = "context_length"
_LICENSE: Final = "general.license"
# Ollama's options that can have recommended values
_PARAMETERS: Final = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "repeat_last_n")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model in a list.

    size        of its files in bytes
    modified    when its file was last written, in seconds since 1970
    digest      identifies the contents of its file
    family      the architecture
    parameters  such as "4B"
    context     the size of its context in tokens, or 0 if unknown
    """

    name: str
    size: int
    modified: float
    digest: str
    family: str
    parameters: str
    quantization: str
    context: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    memory     bytes of main memory that it may take at most
    keep_s     seconds until it is unloaded, or infinity
    """

    model: OllamaModel
    facts: ModelFacts
    memory: int
    keep_s: float


def listed_elsewhere(model: Mapping[str, Any]) -> OllamaModel:
    """Return a model of another server. Its entry in /v1/models has only a few of these facts."""
    context = model.get("max_model_len")
    return OllamaModel(
        name=model["id"],
        size=0,
        modified=created_of(model),
        digest="",
        family="",
        parameters="",
        quantization="",
        context=context if type(context) is int else 0,
    )


def version_body(own: str) -> dict[str, Any]:
    """Return the body of /api/version. `own` is llmrun's version."""
    return {"version": API_VERSION, "llmrun": own}


def tags_body(models: Sequence[OllamaModel]) -> dict[str, Any]:
    """Return the body of /api/tags."""
    return {"models": [{**_named(model), "modified_at": timestamp(model.modified)} for model in models]}


def ps_body(models: Sequence[LoadedModel], now: float) -> dict[str, Any]:
    """Return the body of /api/ps. `now` is a Unix time in seconds."""
    return {"models": [_loaded(model, now) for model in models]}


def show_body(
    model: OllamaModel, header: Mapping[str, Any], template: str, abilities: Sequence[str], facts: ModelFacts | None
) -> dict[str, Any]:
    """Return the body of /api/show.

    header     the keys of the file's header whose values are not lists
    abilities  see `abilities_of`
    facts      the facts about the model if it is loaded. Its context is then the server's
    """
    known = {"general.architecture": model.family, **header}
    if facts is not None:
        known["general.parameter_count"] = facts.info.parameters
    if model.context:
        known[f"{model.family}.{_CONTEXT}"] = model.context
    license_name = header.get(_LICENSE)
    return {
        "modified_at": timestamp(model.modified),
        "details": _details(model),
        "model_info": {
            key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)
        },
        "capabilities": [*abilities],
        "template": template,
        "parameters": "" if facts is None else _parameters(facts),
        **({"license": license_name} if isinstance(license_name, str) else {}),
    }


def abilities_of(header: Mapping[str, Any], *, takes_tools: bool, thinks: bool, fills: bool) -> list[str]:
    """Return the capabilities of a model in Ollama's words.

    header  the keys of the file's header. As in Ollama, models whose file names a pooling only compute embeddings
    fills   whether the model can fill in the middle
    """
    if named_pooling(header, str(header.get("general.architecture"))):
        return [_EMBEDDING]
    more = {_TOOLS: takes_tools, _THINKING: thinks, _FILLING: fills}
    return [_COMPLETION, *(word for word, has in more.items() if has)]


def read_show(body: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the model's name in the body of /api/show, and the fields without effect. Raises InvalidField."""
    fields = Fields(body)
    names = {name: value for name in ("model", "name") if (value := fields.text(name))}
    if fields.peek("verbose") is False:
        fields.value("verbose")
    name = agreed(names)
    if name is None:
        raise missing("model")
    return name, fields.unread()


def _named(model: OllamaModel) -> dict[str, Any]:
    names = {"name": model.name, "model": model.name}
    return {**names, "size": model.size, "digest": model.digest, "details": _details(model)}


def _details(model: OllamaModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": _FORMAT,
        "family": model.family,
        "families": [model.family],
        "parameter_size": model.parameters,
        "quantization_level": model.quantization,
        _CONTEXT: model.context,
    }


def _loaded(loaded: LoadedModel, now: float) -> dict[str, Any]:
    info = loaded.facts.info
    on_gpus, _, layers = info.gpu_layers.partition("/")
    on_gpu = info.file_bytes * int(on_gpus) // int(layers) if layers else 0
    return {
        **_named(loaded.model),
        "size": loaded.memory + on_gpu,
        "size_vram": on_gpu,
        "expires_at": timestamp(min(now + loaded.keep_s, FOREVER_S)),
        _CONTEXT: info.context_size,
    }


def _parameters(facts: ModelFacts) -> str:
    """Return the defaults of Ollama's options, one in each line."""
    values = {"num_ctx": facts.info.context_size}
    values |= {name: getattr(facts.default_sampling, name) for name in _PARAMETERS}
    return "\n".join(
        f"{name:<30} {value:g}" if isinstance(value, float) else f"{name:<30} {value}" for name, value in values.items()
    )


def parameter_label(count: int) -> str:
    """Return a number of parameters in the notation of the lists, or "" if it is unknown."""
    return format_weights(count) if count else ""
