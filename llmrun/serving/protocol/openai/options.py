"""Reads the fields that chat completions and completions have in common, and refuses those without a counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, seen
from llmrun.serving.protocol.openai.adapters import read_adapters
from llmrun.serving.protocol.openai.sampling import read_sampling, read_seed

MOST_CHOICES: Final = 128
MOST_STOPS: Final = 32
LONGEST_STOP: Final = 256  # characters; a long stop string takes time at every token
MOST_LOGPROBS: Final = 20
_NO_LIMIT: Final = -1  # as in llama.cpp
_TO_LEGACY: Final = "use `tools` and `tool_choice` instead"

# Fields that change the answer and are not supported, with the values that are harmless and advice.
REFUSED_IN_COMPLETIONS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "min_tokens": ((0,), "ban the end tokens with `ignore_eos`, and set `max_tokens`"),
    "use_beam_search": ((False,), "use `n` for several answers"),
}
REFUSED_IN_CHATS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    **REFUSED_IN_COMPLETIONS,
    "functions": (([],), _TO_LEGACY),
    "function_call": (("none",), _TO_LEGACY),
    "audio": ((), "this server answers with text only"),
    "modalities": ((["text"],), "this server answers with text only"),
    "moderation": ((), ""),
    "verbosity": (("medium",), "ask for a short or a long answer in a message"),
    "web_search_options": ((), "define a tool that searches"),
}
# Fields that never change an answer, according to OpenAI's documentation. Other values than these, if there are any,
# ask for something that this server does not do, so that they count as ignored.
_QUIET: Final[Mapping[str, tuple[Any, ...] | None]] = {
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "metadata": None,
    "store": (False,),
    "service_tier": ("auto", "default"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request that do not depend on its prompt.

    n         the number of choices for each prompt
    sampling  with seed 0; `seed` is the seed of the first choice
    adapters  see Request
    """

    stream: bool
    include_usage: bool
    n: int
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: SamplingParams
    adapters: Mapping[str, float] | None


def read_options(fields: Fields, facts: ModelFacts, seed: int) -> Options:
    """Read the common fields. Raises InvalidField. `seed` is used if the request sets none."""
    fields.text("model")  # already used to find the model
    leave_quiet(fields)
    stream = bool(fields.boolean("stream"))
    return Options(
        stream,
        _includes_usage(fields) and stream,
        fields.integer("n", 1, MOST_CHOICES) or 1,
        read_seed(fields, seed),
        _read_token_limit(fields),
        read_stop(fields, "stop"),
        read_sampling(fields, facts),
        read_adapters(fields, facts),
    )


def require_chats(facts: ModelFacts, field: str = "messages") -> None:
    """Raise InvalidField for the field with the conversation if the model has no chat template."""
    if not facts.takes_chats:
        hint = "send a prompt to /v1/completions instead"
        raise unsupported(field, "this model has no chat template", hint=hint)


def refuse_in_chats(fields: Fields) -> None:
    """Raise InvalidField for a field that chat completions do not support."""
    refuse_values(fields, REFUSED_IN_CHATS)


def refuse_in_completions(fields: Fields) -> None:
    """Raise InvalidField for a field that completions do not support."""
    refuse_values(fields, REFUSED_IN_COMPLETIONS)


def leave_quiet(fields: Fields) -> None:
    """Mark the fields as read that do not change the answer. Raises InvalidField if they have the wrong type."""
    for name, values in _QUIET.items():
        if values is None:
            if name == "metadata":
                fields.object(name)
            else:
                fields.text(name)
        elif fields.peek(name) in values:
            fields.value(name)


def refuse_values(fields: Fields, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raise InvalidField for fields with values that are not supported.

    refused  name -> the values that are accepted, and advice
    """
    for name, (harmless, advice) in refused.items():
        value = fields.value(name)
        if value is not None and value not in harmless:
            raise unsupported(fields.path(name), f"{seen(value)} is not supported", hint=advice)


def _includes_usage(fields: Fields) -> bool:
    options = fields.fields("stream_options")
    if options is None:
        return False
    leave_obfuscation(options)
    return bool(options.boolean("include_usage"))


def leave_obfuscation(stream_options: Fields) -> None:
    """Mark `include_obfuscation` as read if it is off. OpenAI pads chunks to hide their lengths from eavesdroppers."""
    if stream_options.peek("include_obfuscation") is False:
        stream_options.value("include_obfuscation")


def _read_token_limit(fields: Fields) -> int | None:
    """Return the maximum length of the answer. `max_completion_tokens` is OpenAI's new name, and takes precedence."""
    limits = [fields.integer(name, _NO_LIMIT) for name in ("max_completion_tokens", "max_tokens", "n_predict")]
    for name, limit in zip(("max_completion_tokens", "max_tokens", "n_predict"), limits, strict=True):
        if limit == 0:
            raise fields.wrong(name, "an integer of at least 1, or -1 for no limit")
    limit = next((limit for limit in limits if limit is not None), _NO_LIMIT)
    return None if limit == _NO_LIMIT else limit


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the strings that end the answer, from the field with this name. Raises InvalidField."""
    value, path = fields.value(name), fields.path(name)
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise fields.wrong(name, "a string or a list of strings")
    if len(stops) > MOST_STOPS:
        raise InvalidField(path, f"{len(stops):,} strings are too many; the limit is {MOST_STOPS}")
    for number, stop in enumerate(stops):
        place = path if type(value) is str else f"{path}[{number}]"
        if type(stop) is not str:
            raise InvalidField(place, f"expected a string, got {seen(stop)}", code="invalid_type")
        if not 1 <= len(stop) <= LONGEST_STOP:
            raise InvalidField(place, f"expected 1 to {LONGEST_STOP} characters, got {len(stop):,}")
    return tuple(stops)
