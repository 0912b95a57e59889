"""Reads the fields that chats and completions of Ollama's API share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llmrun.base.amounts import parse_duration
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.facts import ModelFacts
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields
from llmrun.serving.protocol.openai.formats import json_schema_format
from llmrun.serving.protocol.openai.options import read_stop
from llmrun.serving.protocol.openai.requests import read_chat_logprobs
from llmrun.serving.protocol.openai.sampling import read_sampling, read_seed
from llmrun.serving.protocol.openai.thinking import ThinkingOptions, read_thinking

LEVELS: Final = ("low", "medium", "high", "max")
_NO_LIMITS: Final = (-1, -2)  # until the model stops, and until the context is full; the same here
_JSON: Final = "json"
# Whether to drop messages or the beginning of a full context. This server never does.
_CUTS: Final = ("truncate", "shift")
_LONGEST_DURATION: Final = 60  # characters


@dataclass(frozen=True, slots=True)
class OllamaOptions:
    """The options of a request that do not depend on its prompt.

    sampling  with the seed of the request
    ignored   the places of options without effect
    """

    stream: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: SamplingParams
    logprobs: int | None
    response_format: ResponseFormat | None
    ignored: tuple[str, ...]


def read_ollama_options(fields: Fields, facts: ModelFacts, seed: int) -> OllamaOptions:
    """Read the common fields. Raises InvalidField. `seed` is used if the request sets none."""
    fields.text("model")  # already used to find the model
    read_keep_alive(fields)  # already applied by the route
    if fields.boolean("_debug_render_only"):
        raise unsupported("_debug_render_only")
    for name in _CUTS:
        if fields.peek(name) is False:
            fields.value(name)
    options = Fields(_whole_numbers(fields.object("options") or {}), "options")
    _check_context(options, facts)
    sampling = replace(read_sampling(options, facts), seed=read_seed(options, seed))
    return OllamaOptions(
        fields.boolean("stream") is not False,
        _read_limit(options),
        read_stop(options, "stop"),
        sampling,
        read_chat_logprobs(fields),
        _read_format(fields),
        options.unread(),
    )


def read_think(fields: Fields, facts: ModelFacts) -> ThinkingOptions:
    """Read `think`, which is true, false or a level. Raises InvalidField, also if the model does not think."""
    think = fields.value("think")
    if type(think) is str:
        fields.word("think", LEVELS)
    elif think is not None and type(think) is not bool:
        raise fields.wrong("think", f"true, false, or one of {', '.join(LEVELS)}")
    if think and not facts.thinks:
        raise unsupported("think", f"{facts.name} does not think", hint="leave this field out, or send false")
    name = "reasoning_effort" if type(think) is str else "enable_thinking"
    return read_thinking(Fields({name: think}), facts)


def read_keep_alive(fields: Fields) -> float | None:
    """Return `keep_alive` in seconds, infinity for a negative value, or None. Raises InvalidField.

    It is a number of seconds or a duration in Go's notation, such as "1h30m": how long the model stays loaded after
    the answer.
    """
    value = fields.value("keep_alive")
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None:
        raise fields.wrong("keep_alive", 'a number of seconds, or a duration such as "5m"')
    return seconds


def _seconds(value: Any) -> float | None:
    """Return a duration in seconds, or None if it is not valid."""
    try:
        if type(value) is str and len(value) <= _LONGEST_DURATION:
            return parse_duration(value)
        return (math.inf if value < 0 else float(value)) if type(value) in (int, float) else None
    except (ValueError, OverflowError):
        return None


def _whole_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with integers in place of numbers such as 8192.0, which Home Assistant sends."""
    return {name: int(each) if type(each) is float and each.is_integer() else each for name, each in options.items()}


def _check_context(options: Fields, facts: ModelFacts) -> None:
    """Raise InvalidField if `num_ctx` exceeds the server's context. Smaller values have no effect."""
    context = facts.info.context_size
    if options.peek("num_ctx") == context:
        options.value("num_ctx")
        return
    number = options.peek("num_ctx")
    if number is not None and (type(number) is not int or number < 1):
        raise options.wrong("num_ctx", "an integer of at least 1")
    if number is not None and number > context:
        hint = f"leave num_ctx out, or start the server with -c {number}"
        raise unsupported(
            options.path("num_ctx"), f"{number:,} tokens are more than this server's context of {context:,}", hint=hint
        )


def _read_limit(options: Fields) -> int | None:
    """Return the maximum length of the answer."""
    limit = options.integer("num_predict", min(_NO_LIMITS))
    if limit == 0:
        raise options.wrong("num_predict", "an integer of at least 1, or -1 or -2 for no limit")
    return None if limit in _NO_LIMITS else limit


def _read_format(fields: Fields) -> ResponseFormat | None:
    """Return the format of the answer: `json`, a schema, or None for any text."""
    value = fields.value("format")
    if value in (None, ""):
        return None
    if value == _JSON:
        return ResponseFormat(FormatKind.JSON_OBJECT, origin="format")
    if type(value) is not dict:
        raise InvalidField("format", 'expected "json" or a JSON schema', code="invalid_type")
    return json_schema_format(value, "format")
