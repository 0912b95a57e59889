"""Converts the fields that chat completions and completions have in common: the options of a request.

The common fields are the sampling parameters with logit_bias and the seed, the format of the answer in the notations of
OpenAI, llama.cpp and vLLM, the thinking options, and the LoRA adapters in the notation of llama-server.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import structs

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import ModelFacts, Prompt, Request
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams
from llmrun.options.settings import RULES
from llmrun.serving.protocol.declarations import agreed, missing, seen
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.openai import objects
from llmrun.serving.protocol.openai.objects import (
    LARGEST_SEED,
    MOST_BIAS,
    NO_LIMIT,
    Adapter,
    AnswerLimit,
    ChosenAdapter,
    Common,
    Sampling,
    Shared,
    Thinking,
)


def adapters_of(chosen: Sequence[ChosenAdapter] | None, facts: ModelFacts) -> dict[str, float] | None:
    """Return the scales of adapters by name, or None if the request does not choose adapters. Raises InvalidField.

    Each item contains an adapter's number (`id`, as in llama-server) or name. Unlisted adapters are not used.
    """
    if chosen is None:
        return None
    known, scales = [adapter.name for adapter in facts.info.adapters], dict[str, float]()
    for index, item in enumerate(chosen):
        place, number, name = f"lora[{index}]", item.get("id"), item.get("name")
        if (number is None) == (name is None):
            raise InvalidField(f"{place}.id", "expected either the id or the name of an adapter")
        if number is not None:
            name = known[number] if number < len(known) else None
        if name is None or name not in known:
            words = f"the model has no such adapter; it has {len(known)}: {', '.join(known) or 'none'}"
            raise InvalidField(f"{place}.{'name' if number is None else 'id'}", words)
        if name in scales:
            raise InvalidField(place, f"{name} is listed twice")
        scales[name] = item["scale"]
    return scales


def adapters_body(facts: ModelFacts) -> list[Adapter]:
    """Return the body of GET /lora-adapters, without paths, because clients must not learn the adapters' paths."""
    bodies: list[Adapter] = []
    for number, adapter in enumerate(facts.info.adapters):
        bodies.append({"id": number, "name": adapter.name, "scale": adapter.scale})
        if adapter.invocation:
            bodies[-1]["alora_invocation_tokens"] = [*adapter.invocation]
    return bodies


_RANDOM_SEED: Final = -1  # llama.cpp's value
_SEEDS: Final = 1 << 31  # JavaScript's integers are exact up to 2**53, but some clients read 32 bits
_LONGEST_TEXTS: Final = 10_000  # characters in a list of texts
_SAMPLERS_JOINT: Final = ";"


def sampling_of(given: Sampling, facts: ModelFacts, place: str = "") -> SamplingParams:
    """Return the sampling parameters of a request without the seed. Raises InvalidField.

    place  the path of the object with the parameters, which is "" for the body itself
    """
    prefix = f"{place}." if place else ""
    changed: dict[str, Any] = {}
    for name, parameter in SAMPLING.items():
        found = {
            f"{prefix}{field}": _parameter(given["parameters"][field], f"{prefix}{field}", name, parameter)
            for field in parameter.wire
            if field in given["parameters"]
        }
        if found:
            changed[name] = agreed(found)
    bias = {**facts.default_sampling.logit_bias, **_logit_bias(given, facts, f"{prefix}logit_bias")}
    if given.get("ignore_eos"):
        if not facts.end_tokens:
            raise unsupported(f"{prefix}ignore_eos", "not supported for this model")
        bias |= dict.fromkeys(facts.end_tokens, -math.inf)
    return replace(facts.default_sampling, **changed, logit_bias=bias)


def seed_of(given: Sampling, otherwise: int) -> int:
    """Return the seed of a request, or `otherwise` if the request sets no seed."""
    seed = given.get("seed", _RANDOM_SEED)
    return otherwise if seed == _RANDOM_SEED else seed


def seed_from(text: str) -> int:
    """Return a seed derived from a text, such as the random ID of a call."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % _SEEDS


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: `seed` for choice 0, and a SplitMix64 output of `seed` and `choice` otherwise.

    Later versions must not change this function, because clients rely on repeatable answers.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & LARGEST_SEED
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & LARGEST_SEED
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & LARGEST_SEED
    return mixed ^ (mixed >> 31)


def _parameter(value: Any, path: str, name: str, parameter: SamplingParameter) -> Any:
    """Convert a value to the notation of SamplingParams. A list of texts becomes a single text."""
    texts = parameter.texts
    if texts is None:
        return 0 if (name, value) == ("top_k", -1) else value  # in vLLM, -1 disables top_k
    text = value
    if type(value) is list:
        text = _SAMPLERS_JOINT.join(value) if name == "samplers" else json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST_TEXTS:
        raise InvalidField(path, f"longer than {_LONGEST_TEXTS:,} characters")
    try:
        RULES[name].check(text)
    except ValueError:
        raise InvalidField(path, f"expected {texts.words}, got {seen(text)}", hint=texts.advice(text)) from None
    return text


def _logit_bias(given: Sampling, facts: ModelFacts, path: str) -> Mapping[int, float]:
    """Return the bias of tokens by their IDs. A bias of -100, as in OpenAI's API, or false bans a token."""
    found: dict[int, float] = {}
    for key, bias in _pairs(given.get("logit_bias", {}), path):
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < facts.info.vocabulary_size):
            words = f"token IDs from 0 to {facts.info.vocabulary_size - 1}"
            raise InvalidField(path, f"expected {words} as keys, got {seen(key)}")
        found[int(key)] = -math.inf if bias is False or bias == -MOST_BIAS else bias
    return found


def _pairs(given: Mapping[str, float] | Sequence[Sequence[float]], path: str) -> Iterator[tuple[str, float]]:
    """Yield token IDs as texts, each with a bias or False. Raises InvalidField for lists that are not pairs."""
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for number, pair in enumerate(given):
        if len(pair) != 2 or pair[1] is True or abs(pair[1]) > MOST_BIAS:
            words = f"a token ID, and a number from {-MOST_BIAS:g} to {MOST_BIAS:g} or false"
            raise InvalidField(f"{path}[{number}]", f"expected {words}")
        token, bias = pair
        yield f"{token:.0f}" if type(token) is float and token.is_integer() else str(token), bias


def format_of(given: Common) -> ResponseFormat | None:
    """Return the format of the answer, or None for any text. Raises InvalidField, for example for several formats."""
    wanted = given.get("response_format")
    return only_format([*(() if wanted is None else _openai_format(wanted)), *formats_of(given)])


def only_format(found: Sequence[ResponseFormat]) -> ResponseFormat | None:
    """Return the single format, or None. Raises InvalidField if there are several formats."""
    if len(found) > 1:
        raise InvalidField(found[1].origin, f"cannot be combined with {found[0].origin}", hint="send only one format")
    return found[0] if found else None


def formats_of(given: Shared) -> Iterator[ResponseFormat]:
    """Yield the formats in the notations of llama.cpp and vLLM. Raises InvalidField."""
    if grammar := given.get("grammar"):
        yield ResponseFormat(FormatKind.GRAMMAR, grammar, origin="grammar")
    if "json_schema" in given:
        yield json_schema_format(given["json_schema"], "json_schema")
    yield from _vllm_formats(given, "guided_", "guided_")
    if (structured := given.get("structured_outputs")) is not None:
        yield from _vllm_formats(structured, "", "structured_outputs.")
        if structured.get("json_object"):
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin="structured_outputs.json_object")


def _openai_format(wanted: objects.ResponseFormat) -> Iterator[ResponseFormat]:
    if wanted["type"] == "json_object":
        # llama-server also accepts a schema in this field.
        if "schema" in wanted:
            yield json_schema_format(wanted["schema"], "response_format.schema")
        else:
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin="response_format")
    elif wanted["type"] == "json_schema":
        if "json_schema" not in wanted:
            raise missing("response_format.json_schema")
        described = wanted["json_schema"]
        schema_format = json_schema_format(described["schema"], "response_format.json_schema.schema")
        yield structs.replace(schema_format, strict=described.get("strict", False))


def _vllm_formats(given: Mapping[str, Any], prefix: str, place: str) -> Iterator[ResponseFormat]:
    """Yield formats in vLLM's notations: fields that begin with `prefix`, or fields of an object at `place`."""
    if f"{prefix}json" in given:
        yield json_schema_format(given[f"{prefix}json"], f"{place}json")
    for name, kind in (("regex", FormatKind.REGEX), ("grammar", FormatKind.GRAMMAR)):
        if text := given.get(f"{prefix}{name}"):
            yield ResponseFormat(kind, text, origin=f"{place}{name}")
    if f"{prefix}choice" in given:
        yield ResponseFormat(FormatKind.CHOICE, choices=tuple(given[f"{prefix}choice"]), origin=f"{place}choice")


def json_schema_format(schema: dict[str, Any] | bool | str, origin: str) -> ResponseFormat:
    """Return the format for a schema, which may be an object, a boolean or JSON text."""
    text = schema if type(schema) is str else json.dumps(schema, ensure_ascii=False)
    return ResponseFormat(FormatKind.JSON_SCHEMA, text, origin=origin)


BUDGETS: Final = ("thinking_budget_tokens", "thinking_budget", "think_budget")
_OFF: Final = "none"
_VARIABLES: Final = "chat_template_kwargs"
_SWITCHES: Final = ("enable_thinking", "thinking")  # the variable names that most templates use


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """The thinking options of a Request, and the variables of its ChatPrompt.

    without_effect  the names of fields that are ignored because the model cannot think or another field has precedence
    """

    think: bool | None
    budget: int | None
    variables: Mapping[str, Any]
    without_effect: tuple[str, ...]


def thinking_of(given: Thinking, facts: ModelFacts, effort: str | None, effort_name: str) -> ThinkingOptions:
    """Return the thinking options. Raises InvalidField if two budgets contradict each other.

    If other fields contradict each other, template variables have precedence over `enable_thinking`, which has
    precedence over the effort. Clients often set the effort for all requests and turn thinking off in some of them.

    effort, effort_name  the thinking effort, and the path of its field
    """
    variables = dict(given.get(_VARIABLES, {}))
    # Maps a field's name to True if the field requests thinking, and to False if the field switches thinking off.
    wishes = {f"{_VARIABLES}.{name}": variables[name] for name in _SWITCHES if type(variables.get(name)) is bool}
    if "enable_thinking" in given:
        wishes["enable_thinking"] = given["enable_thinking"]
    if effort is not None:
        wishes[effort_name] = effort != _OFF
    think = next(iter(wishes.values()), None)
    overruled = [name for name, wish in wishes.items() if wish is not think]
    if effort is not None and effort != _OFF and think:
        variables.setdefault("reasoning_effort", effort)  # some templates write the effort into the prompt
    values: Mapping[str, Any] = given
    limits = {name: values[name] for name in BUDGETS if name in values}
    budget = agreed(limits)
    if budget == NO_LIMIT:
        limits, budget = {}, None
    if facts.thinks:
        return ThinkingOptions(think, budget, variables, (*overruled,))
    in_vain = (*(wishes if think else overruled), *limits)
    return ThinkingOptions(None if think else think, None, variables, in_vain)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request that do not depend on its prompt.

    n       the number of choices for each prompt
    returns_progress  True if the stream reports the progress of the prompt
    seed    the seed of the first choice, which replaces the seed in `sampling`
    others  as in Request
    """

    stream: bool
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: SamplingParams
    logprobs: int | None = None
    echo: bool = False
    response_format: ResponseFormat | None = None
    adapters: Mapping[str, float] | None = None
    n: int = 1
    include_usage: bool = False
    returns_progress: bool = False

    def request(self, prompt: Prompt, thinking: ThinkingOptions | None = None) -> Request:
        """Return the request for one choice."""
        return Request(
            prompt,
            self.max_tokens,
            self.stop,
            replace(self.sampling, seed=self.seed),
            self.logprobs,
            None if thinking is None else thinking.think,
            None if thinking is None else thinking.budget,
            self.response_format,
            adapters=self.adapters,
            echo=self.echo,
        )


def options_of(given: Common, facts: ModelFacts, seed: int, max_tokens: int | None) -> Options:
    """Convert the fields of `Common`. Raises InvalidField. `seed` is the default seed."""
    stream = given.get("stream", False)
    if max_tokens == 0 and given["parameters"].get("samplers") == []:
        del given["parameters"]["samplers"]  # editors send an empty list if they only want the prompt to be cached
    return Options(
        stream=stream,
        returns_progress=given.get("return_progress", False),
        include_usage=given.get("stream_options", {}).get("include_usage", False) and stream,
        n=given.get("n", 1),
        seed=seed_of(given, seed),
        max_tokens=max_tokens,
        stop=stops_of(given.get("stop")),
        sampling=sampling_of(given, facts),
        adapters=adapters_of(given.get("lora"), facts),
    )


def require_chats(facts: ModelFacts, field: str = "messages") -> None:
    """Raise InvalidField for `field`, which contains the conversation, if the model has no chat template."""
    if not facts.takes_chats:
        hint = "send a prompt to /v1/completions instead"
        raise unsupported(field, "this model has no chat template", hint=hint)


def token_limit(given: AnswerLimit, n_predict: int | None) -> int | None:
    """Return the maximum length of the answer. OpenAI's newer field `max_completion_tokens` takes precedence.

    n_predict  llama.cpp's name for `max_tokens`
    """
    limit = given.get("max_completion_tokens", given.get("max_tokens", n_predict))
    return None if limit == NO_LIMIT else limit


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
