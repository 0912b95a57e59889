"""Reads the fields that decide how tokens are chosen: the sampling parameters, logit_bias and the seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from llmrun.base.sampling_texts import ListOfTexts
from llmrun.engine.facts import ModelFacts
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams
from llmrun.options.settings import RULES
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import MOST_INTEGER, Fields, agreed, seen

_MOST_BIAS: Final = 100.0
_LARGEST_SEED: Final = 2**64 - 1
_RANDOM_SEED: Final = -1  # as in llama.cpp
_SEEDS: Final = 1 << 31  # JavaScript's numbers are exact up to 2**53, but some clients read 32 bits
_LONGEST_TEXTS: Final = 10_000  # characters of a list of texts
_SAMPLERS_JOINT: Final = ";"


def read_sampling(fields: Fields, facts: ModelFacts) -> SamplingParams:
    """Return the sampling of a request, apart from its seed. Raises InvalidField."""
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
    """Return the seed of a request, or `otherwise` if it sets none. Raises InvalidField."""
    seed = fields.integer("seed", _RANDOM_SEED, _LARGEST_SEED)
    return otherwise if seed in (None, _RANDOM_SEED) else seed


def seed_from(text: str) -> int:
    """Return a seed that is derived from a text, such as the random ID of a call."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % _SEEDS


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: the request's seed for choice 0, and otherwise SplitMix64 of both.

    A later version must not change this, because clients rely on answers that can be repeated.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _LARGEST_SEED
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _LARGEST_SEED
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _LARGEST_SEED
    return mixed ^ (mixed >> 31)


def _read_parameter(fields: Fields, name: str, parameter: SamplingParameter) -> Any:
    """Return the value of a parameter, or None. It may be given under several names if the values are equal."""
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
        return 0  # vLLM's way to disable it
    most = MOST_INTEGER if math.isinf(parameter.maximum) else int(parameter.maximum)
    return fields.integer(field, int(parameter.minimum), most)


def _read_texts(fields: Fields, field: str, name: str, texts: ListOfTexts) -> str | None:
    """Return a list of texts in the notation of SamplingParams. It may also be given in that notation."""
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
