"""Reads the fields that chat completions and completions have in common, and refuses those without a counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.errors import ModelNotFound
from llmrun.gguf.problems import shown
from llmrun.protocol.errors import InvalidField, unsupported
from llmrun.protocol.fields import Fields, seen
from llmrun.protocol.openai.sampling import read_sampling, read_seed
from llmrun.sampling_params import SamplingParams

MOST_CHOICES: Final = 128
MOST_STOPS: Final = 32
LONGEST_STOP: Final = 256  # characters; a long stop string takes time at every token
MOST_LOGPROBS: Final = 20
_NO_LIMIT: Final = -1  # as in llama.cpp
_TO_LEGACY: Final = "use `tools` and `tool_choice` instead"

# Fields that change the answer and are not supported, with the values that are harmless and advice.
_REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "min_tokens": ((0,), "ban the end tokens with `ignore_eos`, and set `max_tokens`"),
    "use_beam_search": ((False,), "use `n` for several answers"),
}
REFUSED_IN_CHATS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    **_REFUSED,
    "functions": (([],), _TO_LEGACY),
    "function_call": (("none",), _TO_LEGACY),
    "audio": ((), "this server answers with text only"),
    "modalities": ((["text"],), "this server answers with text only"),
    "moderation": ((), ""),
    "verbosity": (("medium",), "ask for a short or a long answer in a message"),
    "web_search_options": ((), "define a tool that searches"),
}
REFUSED_IN_COMPLETIONS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    **_REFUSED,
    "suffix": (("",), "write the prompt in the model's own format for filling in the middle"),
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
    """

    stream: bool
    include_usage: bool
    n: int
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: SamplingParams


def read_options(fields: Fields, facts: ModelFacts) -> Options:
    """Read the common fields. Raises InvalidField, and ModelNotFound if the request names another model."""
    _check_model(fields, facts)
    _leave_quiet(fields)
    stream = bool(fields.boolean("stream"))
    return Options(
        stream,
        _includes_usage(fields) and stream,
        fields.integer("n", 1, MOST_CHOICES) or 1,
        read_seed(fields),
        _read_token_limit(fields),
        _read_stop(fields),
        read_sampling(fields, facts),
    )


def refuse_in_chats(fields: Fields) -> None:
    """Raise InvalidField for a field that chat completions do not support."""
    _refuse(fields, REFUSED_IN_CHATS)


def refuse_in_completions(fields: Fields) -> None:
    """Raise InvalidField for a field that completions do not support."""
    _refuse(fields, REFUSED_IN_COMPLETIONS)


def _check_model(fields: Fields, facts: ModelFacts) -> None:
    name = fields.text("model")
    if name not in (None, "", facts.name):
        raise ModelNotFound(f"no such model: {shown(name or '', 100)}", hint=f"this server has {facts.name}")


def _leave_quiet(fields: Fields) -> None:
    """Mark the fields as read that do not change the answer."""
    for name, values in _QUIET.items():
        if values is None:
            if name == "metadata":
                fields.object(name)
            else:
                fields.text(name)
        elif fields.peek(name) in values:
            fields.value(name)


def _refuse(fields: Fields, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (harmless, advice) in refused.items():
        value = fields.value(name)
        if value is not None and value not in harmless:
            raise unsupported(name, f"{seen(value)} is not supported", hint=advice)


def _includes_usage(fields: Fields) -> bool:
    options = fields.fields("stream_options")
    if options is None:
        return False
    include_usage = bool(options.boolean("include_usage"))
    if options.peek("include_obfuscation") is False:  # OpenAI pads chunks to hide their lengths from eavesdroppers
        options.value("include_obfuscation")
    return include_usage


def _read_token_limit(fields: Fields) -> int | None:
    """Return the maximum length of the answer. `max_completion_tokens` is OpenAI's new name, and takes precedence."""
    limits = [fields.integer(name, _NO_LIMIT) for name in ("max_completion_tokens", "max_tokens", "n_predict")]
    for name, limit in zip(("max_completion_tokens", "max_tokens", "n_predict"), limits, strict=True):
        if limit == 0:
            raise fields.wrong(name, "an integer of at least 1, or -1 for no limit")
    limit = next((limit for limit in limits if limit is not None), _NO_LIMIT)
    return None if limit == _NO_LIMIT else limit


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise fields.wrong("stop", "a string or a list of strings")
    if len(stops) > MOST_STOPS:
        raise InvalidField("stop", f"{len(stops):,} strings are too many; the limit is {MOST_STOPS}")
    for number, stop in enumerate(stops):
        place = "stop" if type(value) is str else f"stop[{number}]"
        if type(stop) is not str:
            raise InvalidField(place, f"expected a string, got {seen(stop)}", code="invalid_type")
        if not 1 <= len(stop) <= LONGEST_STOP:
            raise InvalidField(place, f"expected 1 to {LONGEST_STOP} characters, got {len(stop):,}")
    return tuple(stops)
