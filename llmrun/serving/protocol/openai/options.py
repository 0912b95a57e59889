"""Reads the fields that chat completions and completions have in common, and refuses unsupported fields.

The common fields are the sampling parameters with logit_bias and the seed, the format of the answer in the notations of
OpenAI, llama.cpp and vLLM, the thinking options, and the LoRA adapters in the notation of llama-server.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from llmrun.base.sampling_texts import ListOfTexts
from llmrun.base.types import LARGEST_SCALE
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import ModelFacts, Prompt, Request
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams
from llmrun.options.settings import RULES
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import MOST_INTEGER, Fields, agreed, needed, seen


def read_adapters(fields: Fields, facts: ModelFacts) -> dict[str, float] | None:
    """Return the scales of adapters by name, or None if the request does not choose adapters. Raises InvalidField.

    Each item contains an adapter's number (`id`, as in llama-server) or name. Unlisted adapters are not used.
    """
    items = fields.item_fields("lora")
    if items is None:
        return None
    adapters, scales = facts.info.adapters, dict[str, float]()
    for item in items:
        number, name = item.integer("id", 0), item.text("name")
        if (number is None) == (name is None):
            raise InvalidField(item.path("id"), "expected either the id or the name of an adapter")
        known = [adapter.name for adapter in adapters]
        if number is not None:
            name = known[number] if number < len(known) else None
        if name not in known:
            words = f"the model has no such adapter; it has {len(known)}: {', '.join(known) or 'none'}"
            raise InvalidField(item.path("id" if number is not None else "name"), words)
        scale = needed(item, "scale", item.number("scale", -LARGEST_SCALE, LARGEST_SCALE))
        if name in scales:
            raise InvalidField(item.place, f"{name} is listed twice")
        scales[name] = scale
    return scales


def adapters_body(facts: ModelFacts) -> list[dict[str, Any]]:
    """Return the body of GET /lora-adapters, without paths, because clients must not learn the adapters' paths."""
    return [
        {
            "id": number,
            "name": adapter.name,
            "scale": adapter.scale,
            **({"alora_invocation_tokens": [*adapter.invocation]} if adapter.invocation else {}),
        }
        for number, adapter in enumerate(facts.info.adapters)
    ]


_MOST_BIAS: Final = 100.0
LARGEST_SEED: Final = 2**64 - 1
_RANDOM_SEED: Final = -1  # llama.cpp's value
_SEEDS: Final = 1 << 31  # JavaScript's integers are exact up to 2**53, but some clients read 32 bits
_LONGEST_TEXTS: Final = 10_000  # characters in a list of texts
_SAMPLERS_JOINT: Final = ";"


def read_sampling(fields: Fields, facts: ModelFacts) -> SamplingParams:
    """Return the sampling parameters of a request without the seed. Raises InvalidField."""
    changed: dict[str, Any] = {}
    for name, parameter in SAMPLING.items():
        value = _read_parameter(fields, name, parameter)
        if value is not None:
            changed[name] = value
    bias = {**facts.default_sampling.logit_bias, **_read_logit_bias(fields, facts)}
    if fields.boolean("ignore_eos"):
        if not facts.end_tokens:
            raise unsupported(fields.path("ignore_eos"), "not supported for this model")
        bias |= dict.fromkeys(facts.end_tokens, -math.inf)
    return replace(facts.default_sampling, **changed, logit_bias=bias)


def read_seed(fields: Fields, otherwise: int) -> int:
    """Return the seed of a request, or `otherwise` if the request sets no seed. Raises InvalidField."""
    seed = fields.integer("seed", _RANDOM_SEED, LARGEST_SEED)
    return otherwise if seed in (None, _RANDOM_SEED) else seed


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


def _read_parameter(fields: Fields, name: str, parameter: SamplingParameter) -> Any:
    """Return the value of a parameter, or None. Several names of one parameter may be set if their values are equal."""
    found: dict[str, Any] = {}
    for field in parameter.wire or (name,):
        value = _read_value(fields, field, name, parameter)
        if value is not None:
            found[fields.path(field)] = value
    return agreed(found)


def _read_value(fields: Fields, field: str, name: str, parameter: SamplingParameter) -> Any:
    if parameter.texts is not None:
        return _read_texts(fields, field, name, parameter.texts)
    if parameter.kind is float:
        return fields.number(field, parameter.minimum, parameter.maximum)
    if name == "top_k" and fields.value(field) == -1:
        return 0  # in vLLM, -1 disables top_k
    most = MOST_INTEGER if math.isinf(parameter.maximum) else int(parameter.maximum)
    return fields.integer(field, int(parameter.minimum), most)


def _read_texts(fields: Fields, field: str, name: str, texts: ListOfTexts) -> str | None:
    """Return a list of texts in the notation of SamplingParams. The field may be a list or a string."""
    value = fields.value(field)
    if value is None:
        return None
    text = value
    if type(value) is list and all(type(each) is str for each in value):
        text = _SAMPLERS_JOINT.join(value) if name == "samplers" else json.dumps(value, ensure_ascii=False)
    if type(text) is not str:
        raise InvalidField(fields.path(field), f"expected a list of strings, got {seen(value)}", code="invalid_type")
    if len(text) > _LONGEST_TEXTS:
        raise InvalidField(fields.path(field), f"longer than {_LONGEST_TEXTS:,} characters")
    try:
        RULES[name].check(text)
    except ValueError:
        raise InvalidField(
            fields.path(field), f"expected {texts.words}, got {seen(text)}", hint=texts.advice(text)
        ) from None
    return text


def _read_logit_bias(fields: Fields, facts: ModelFacts) -> Mapping[int, float]:
    """Return the bias of tokens by their IDs. A bias of -100 bans a token, as in OpenAI's API."""
    given = fields.object("logit_bias") or {}
    found: dict[int, float] = {}
    entries = Fields(given, fields.path("logit_bias"))
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < facts.info.vocabulary_size):
            words = f"token IDs from 0 to {facts.info.vocabulary_size - 1}"
            raise InvalidField(fields.path("logit_bias"), f"expected {words} as keys, got {seen(key)}")
        bias = entries.number(key, -_MOST_BIAS, _MOST_BIAS)
        if bias is not None:
            found[int(key)] = -math.inf if bias == -_MOST_BIAS else bias
    return found


_TYPES: Final = ("text", "json_object", "json_schema")
# vLLM's older fields begin with "guided_", and the newer fields are in the object "structured_outputs"
_OLD, _NEW = "guided_", "structured_outputs"


def read_format(fields: Fields) -> ResponseFormat | None:
    """Return the format of the answer, or None for any text. Raises InvalidField, for example for several formats."""
    return _only([*_openai(fields.fields("response_format")), *_others(fields)])


def read_text_format(fields: Fields, text: Fields) -> ResponseFormat | None:
    """Return the format in `text.format` of the Responses API, or None for any text. Raises InvalidField."""
    return _only([*_openai(text.fields("format"), flat=True), *_others(fields)])


def _only(found: list[ResponseFormat]) -> ResponseFormat | None:
    """Return the single format, or None. Raises InvalidField if there are several formats."""
    if len(found) > 1:
        raise InvalidField(found[1].origin, f"cannot be combined with {found[0].origin}", hint="send only one format")
    return found[0] if found else None


def _others(fields: Fields) -> Iterator[ResponseFormat]:
    """Yield the formats in the notations of llama.cpp and vLLM."""
    yield from _llama(fields)
    yield from _vllm(fields, _OLD)
    structured = fields.fields(_NEW)
    if structured is not None:
        yield from _vllm(structured, "")
        if structured.boolean("json_object"):
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin=structured.path("json_object"))


def _openai(wanted: Fields | None, *, flat: bool = False) -> Iterator[ResponseFormat]:
    """Yield a format in OpenAI's notation. With `flat`, the schema is not inside an object `json_schema`."""
    if wanted is None:
        return
    kind = wanted.needed_text("type")
    if kind not in _TYPES:
        raise unsupported(wanted.path("type"), f"expected one of {', '.join(_TYPES)}, got {seen(kind)}")
    if kind == "json_object":
        # llama-server also accepts a schema in this field.
        schema = wanted.value("schema")
        if schema is None:
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin=wanted.place)
        else:
            yield json_schema_format(schema, wanted.path("schema"))
    elif kind == "json_schema":
        described = needed(wanted, "json_schema", wanted if flat else wanted.fields("json_schema"))
        described.text("name")
        described.text("description")
        described.boolean("strict")  # all schemas are strictly enforced
        schema = needed(described, "schema", described.value("schema"))
        yield json_schema_format(schema, described.path("schema"))


def _llama(fields: Fields) -> Iterator[ResponseFormat]:
    if grammar := fields.text("grammar"):
        yield ResponseFormat(FormatKind.GRAMMAR, grammar, origin="grammar")
    schema = fields.value("json_schema")
    if schema is not None:
        yield json_schema_format(schema, "json_schema")


def _vllm(fields: Fields, prefix: str) -> Iterator[ResponseFormat]:
    json_name, choice_name = f"{prefix}json", f"{prefix}choice"
    schema = fields.value(json_name)
    if schema is not None:
        yield json_schema_format(schema, fields.path(json_name))
    for name, kind in ((f"{prefix}regex", FormatKind.REGEX), (f"{prefix}grammar", FormatKind.GRAMMAR)):
        if text := fields.text(name):
            yield ResponseFormat(kind, text, origin=fields.path(name))
    choices = fields.items(choice_name)
    if choices is not None:
        yield _choice(choices, fields.path(choice_name))


def json_schema_format(schema: Any, origin: str) -> ResponseFormat:
    """Return the format for a schema, which may be an object, a boolean or JSON text."""
    if type(schema) is str:
        return ResponseFormat(FormatKind.JSON_SCHEMA, schema, origin=origin)
    if type(schema) not in (dict, bool):
        raise InvalidField(origin, f"expected a JSON schema, got {seen(schema)}", code="invalid_type")
    return ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), origin=origin)


def _choice(choices: list[Any], origin: str) -> ResponseFormat:
    if not choices:
        raise InvalidField(origin, "expected at least one choice, got an empty list")
    for number, choice in enumerate(choices):
        if type(choice) is not str or not choice:
            raise InvalidField(f"{origin}[{number}]", f"expected a string that is not empty, got {seen(choice)}")
    return ResponseFormat(FormatKind.CHOICE, choices=tuple(choices), origin=origin)


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGETS: Final = ("thinking_budget_tokens", "thinking_budget", "think_budget")
_OFF: Final = EFFORTS[0]
_NO_LIMIT: Final = -1
_VARIABLES: Final = "chat_template_kwargs"
_SWITCHES: Final = ("enable_thinking", "thinking")  # the variable names that most templates use


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """The thinking options of a Request, and the variables of its ChatPrompt.

    without_effect  the names of fields that are ignored because the model cannot think
    """

    think: bool | None
    budget: int | None
    variables: Mapping[str, Any]
    without_effect: tuple[str, ...]


def read_thinking(fields: Fields, facts: ModelFacts, reasoning: Fields | None = None) -> ThinkingOptions:
    """Read the fields that control thinking. Raises InvalidField, for example if two fields contradict each other.

    reasoning  the object of the Responses API that contains the effort, or None to read the field `reasoning_effort`
    """
    variables = dict(fields.object(_VARIABLES) or {})
    if reasoning is None:
        effort_name, effort = "reasoning_effort", fields.word("reasoning_effort", EFFORTS)
    else:
        effort_name, effort = "reasoning.effort", reasoning.word("effort", EFFORTS)
    wishes: dict[str, bool] = {}  # maps a field's name to True if the field requests thinking
    if effort is not None:
        wishes[effort_name] = effort != _OFF
    switch = fields.boolean("enable_thinking")
    if switch is not None:
        wishes["enable_thinking"] = switch
    for name in _SWITCHES:
        if type(variables.get(name)) is bool:
            wishes[f"{_VARIABLES}.{name}"] = variables[name]
    think = agreed(wishes)
    if effort is not None and effort != _OFF:
        variables.setdefault("reasoning_effort", effort)  # some templates write the effort into the prompt
    limits = {name: value for name in BUDGETS if (value := fields.integer(name, _NO_LIMIT)) is not None}
    budget = agreed(limits)
    if budget == _NO_LIMIT:
        limits, budget = {}, None
    if facts.thinks:
        return ThinkingOptions(think, budget, variables, ())
    in_vain = (*wishes, *limits) if think else (*limits,)
    return ThinkingOptions(None if think else think, None, variables, in_vain)


MOST_CHOICES: Final = 128
MOST_STOPS: Final = 32
LONGEST_STOP: Final = 256  # characters; a long stop string costs time at every token
MOST_LOGPROBS: Final = 20
_TO_LEGACY: Final = "use `tools` and `tool_choice` instead"

# Maps unsupported fields that would change the answer to harmless values and advice.
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
# Fields that never change an answer, according to OpenAI's documentation. If a tuple is given, other values request an
# unsupported feature, and the field is reported as ignored.
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

    n       the number of choices for each prompt
    seed    the seed of the first choice, which replaces the seed in `sampling`
    others  as in Request
    """

    stream: bool
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: SamplingParams
    logprobs: int | None = None
    response_format: ResponseFormat | None = None
    adapters: Mapping[str, float] | None = None
    n: int = 1
    include_usage: bool = False

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
        )


def read_options(fields: Fields, facts: ModelFacts, seed: int) -> Options:
    """Read the common fields. `seed` is the default seed. Raises InvalidField."""
    fields.text("model")  # the route has already used this field
    leave_quiet(fields)
    stream = bool(fields.boolean("stream"))
    return Options(
        stream=stream,
        include_usage=_includes_usage(fields) and stream,
        n=fields.integer("n", 1, MOST_CHOICES) or 1,
        seed=read_seed(fields, seed),
        max_tokens=_read_token_limit(fields),
        stop=read_stop(fields, "stop"),
        sampling=read_sampling(fields, facts),
        adapters=read_adapters(fields, facts),
    )


def require_chats(facts: ModelFacts, field: str = "messages") -> None:
    """Raise InvalidField for `field`, which contains the conversation, if the model has no chat template."""
    if not facts.takes_chats:
        hint = "send a prompt to /v1/completions instead"
        raise unsupported(field, "this model has no chat template", hint=hint)


def leave_quiet(fields: Fields) -> None:
    """Mark fields that do not change the answer as read. Raises InvalidField if a field has the wrong type."""
    for name, values in _QUIET.items():
        if values is None:
            if name == "metadata":
                fields.object(name)
            else:
                fields.text(name)
        elif fields.peek(name) in values:
            fields.value(name)


def refuse_values(fields: Fields, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raise InvalidField for fields with unsupported values.

    refused  maps the names of fields to accepted values and advice
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
    """Mark a false `include_obfuscation` as read. OpenAI pads chunks to hide their lengths from eavesdroppers."""
    if stream_options.peek("include_obfuscation") is False:
        stream_options.value("include_obfuscation")


def _read_token_limit(fields: Fields) -> int | None:
    """Return the maximum length of the answer. OpenAI's newer field `max_completion_tokens` takes precedence."""
    limits = {name: fields.integer(name, _NO_LIMIT) for name in ("max_completion_tokens", "max_tokens", "n_predict")}
    for name, limit in limits.items():
        if limit == 0:
            raise fields.wrong(name, "an integer of at least 1, or -1 for no limit")
    limit = next((limit for limit in limits.values() if limit is not None), _NO_LIMIT)
    return None if limit == _NO_LIMIT else limit


def read_stop(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the stop strings in a field. Raises InvalidField."""
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
