"""Random requests of all kinds, whose answers depend on nothing but the request."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

_WORDS = (
    "the sea ferry rope rain needle weather mountain stairs ocean green coat coin child duck boat list of numbers sum "
    "sort python function red blue seven twelve letter book pencil hour name why how what explain tell short long"
)
_SYSTEMS = (
    "You are a helpful assistant who answers in one sentence. " * 4,
    "Translate what the user says into simple words, and give an example for each of them. " * 6,
)
_SCHEMA = json.loads(
    """{"type": "object", "required": ["name", "age", "tags"], "additionalProperties": false, "properties": {
    "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}}}"""
)
_TOOL = json.loads(
    """{"type": "function", "function": {"name": "weather", "description": "Return the weather of a city.",
    "parameters": {"type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
    "city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}}}}}"""
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the names of the features that it uses."""

    path: str
    body: dict[str, Any]
    features: tuple[str, ...]

    @property
    def described(self) -> str:
        """The request in one line."""
        return f"{self.path} {json.dumps(self.body)}"


def random_requests(seed: int, count: int, *, with_tools: bool) -> list[Asked]:
    """Return requests of about 10 to 400 tokens, with answers of at most 80."""
    return [_random_request(random.Random(f"{seed}.{number}"), with_tools) for number in range(count)]


def _random_request(chance: random.Random, with_tools: bool) -> Asked:
    is_chat = chance.random() < 0.6
    body: dict[str, Any] = {"seed": chance.randrange(1 << 31), "max_tokens": chance.randint(1, 80)}
    if is_chat:
        body["messages"] = _messages(chance)
    else:
        body["prompt"] = random_words(chance, 2, 120)
    body |= _sampling(chance) if chance.random() < 0.6 else {"temperature": 0}
    features = ["chat" if is_chat else "completion"]
    for name, (share, fields) in _FEATURES.items():
        if chance.random() < share:
            body |= fields(chance, is_chat)
            features.append(name)
    if with_tools and is_chat and "format" not in features and chance.random() < 0.3:
        body |= {"tools": [_TOOL], "tool_choice": chance.choice(("auto", "required"))}
        features.append("tools")
    return Asked(CHAT if is_chat else COMPLETION, body, tuple(features))


def random_words(chance: random.Random, least: int, most: int) -> str:
    """Return a text of so many words, which are about as many tokens."""
    return " ".join(chance.choices(_WORDS.split(), k=chance.randint(least, most)))


def _messages(chance: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": random_words(chance, 2, 60)}]
    if chance.random() < 0.3:
        answer = {"role": "assistant", "content": random_words(chance, 2, 20)}
        messages += [answer, {"role": "user", "content": random_words(chance, 2, 20)}]
    if chance.random() < 0.5:
        messages.insert(0, {"role": "system", "content": chance.choice(_SYSTEMS)})
    return messages


def _sampling(chance: random.Random) -> dict[str, Any]:
    values: dict[str, Sequence[float]] = {
        "top_p": (0.5, 0.9, 1.0),
        "top_k": (0, 5, 40),
        "min_p": (0.0, 0.05),
        "repeat_penalty": (1.0, 1.1),
        "frequency_penalty": (0.0, 0.5),
    }
    chosen = {name: chance.choice(of) for name, of in values.items() if chance.random() < 0.5}
    return {"temperature": round(chance.uniform(0.2, 2.0), 2), **chosen}


def _logprobs(chance: random.Random, is_chat: bool) -> dict[str, Any]:
    most = chance.randint(0, 5)
    return {"logprobs": True, "top_logprobs": most} if is_chat else {"logprobs": most}


def _format(chance: random.Random, is_chat: bool) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}
    regex = r"[a-z]{3,12}( [a-z]{3,12}){2,5}\."
    return chance.choice(
        ({"guided_regex": regex}, {"response_format": {"type": "json_object"}}, {"response_format": schema})
    )


def _stream(chance: random.Random, is_chat: bool) -> dict[str, Any]:
    return {"stream": True, **({"stream_options": {"include_usage": True}} if chance.random() < 0.5 else {})}


_STOPS = (".", ",", "\n", " the", "and", "a")
# name -> the share of the requests that have it, and the function that returns its fields
_FEATURES: dict[str, tuple[float, Callable[[random.Random, bool], dict[str, Any]]]] = {
    "logprobs": (0.2, _logprobs),
    "stop": (
        0.2,
        lambda chance, _: {"stop": chance.sample([".", ",", "\n", " the", "and", "a"], chance.randint(1, 3))},
    ),
    "format": (0.15, _format),
    "choices": (0.15, lambda chance, _: {"n": chance.randint(2, 3)}),
    "stream": (0.4, _stream),
}
