"""Random requests, and clients whose answers must be the same under all conditions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from llmrun.bench.serving.exchange import Exchange
from tests.soak.driver import Broken, Soak
from tests.support.serving.http_client import post_patiently
from tests.support.serving.served import Served, scripted_arguments

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


# --- clients

_VARYING = ("id", "created", "timings")
_DONE = "[DONE]"
_WATCH_S = 0.1
_BEAT_S = 0.7  # a little longer than the time between two heartbeats of the engine


class Incomplete(Exception):
    """A response that cannot be compared, because it is an error or was cut off."""


class Clients:
    """Clients that ask the same requests several times."""

    def __init__(self, asked: Sequence[Asked], key: str = "") -> None:
        self.asked, self.expected, self._key = asked, [""] * len(asked), key

    async def learn(self, port: int) -> None:
        """Ask one request after another, to know the answers."""
        for number in range(len(self.asked)):
            self.expected[number] = comparable(await self.ask(port, number))

    async def ask(self, port: int, number: int) -> Exchange:
        """Ask one request, again and again while the server says that it is busy."""
        return await post_patiently(port, self.asked[number].path, self.asked[number].body, self._key)

    async def ask_all(self, port: int, numbers: Iterable[int], at_once: int) -> list[Exchange]:
        """Ask some requests, at most `at_once` at a time. Compare the answers that are known."""
        room = asyncio.Semaphore(at_once)

        async def ask(number: int) -> Exchange:
            async with room:
                exchange = await self.ask(port, number)
            try:
                self.compare(number, exchange)
            except Incomplete as error:
                raise Broken(f"{error}: {self.asked[number].described}") from error
            return exchange

        return await asyncio.gather(*map(ask, numbers))

    def compare(self, number: int, exchange: Exchange) -> None:
        """Raise Broken if an answer differs from the expected one, and Incomplete if there is none."""
        found = comparable(exchange)
        if self.expected[number] not in ("", found):
            raise Broken(f"{self.asked[number].described}\n  {self.expected[number]}\n  {found}")


@asynccontextmanager
async def watched(measure: Callable[[], float]) -> AsyncIterator[list[float]]:
    """Yield a list to which something measured is added, now and then."""
    samples = []

    async def watch() -> None:
        while True:
            samples.append(await asyncio.to_thread(measure))
            await asyncio.sleep(_WATCH_S)

    watching = asyncio.create_task(watch())
    try:
        yield samples
    finally:
        watching.cancel()


def model_arguments(soak: Soak, step_seconds: float) -> list[str]:
    """Return the arguments of `llmrun serve` that name the model, which is scripted by default."""
    return [str(soak.path())] if soak.model else scripted_arguments(soak.folder, step_seconds=step_seconds)


def context_size(soak: Soak) -> int:
    """Return a context size. The tokens of the scripted model are bytes."""
    return 1024 if soak.model else 2048


def settled_metrics(server: Served) -> Mapping[str, float]:
    """Return the metrics once they include the last step."""
    time.sleep(_BEAT_S)
    return server.metrics()


def comparable(exchange: Exchange) -> str:
    """Return everything in an answer that must not depend on the load, as text. Raises Incomplete.

    The chunks of a stream are in the order of their choices.
    """
    text = exchange.body.decode(errors="replace")
    if exchange.problem or exchange.status != 200:
        raise Incomplete(f"status {exchange.status} {exchange.problem} {text[:300]}")
    if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
        return json.dumps(_without_varying(json.loads(text)))
    bodies = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if not bodies or bodies[-1] != _DONE:
        raise Incomplete(f"a stream without its end: {text[-300:]}")
    chunks = [json.loads(each) for each in bodies[:-1]]
    if len({chunk["id"] for chunk in chunks}) != 1:
        raise Incomplete("the chunks of a stream have several ids")
    chunks.sort(key=lambda chunk: chunk["choices"][0]["index"] if chunk["choices"] else 1 << 30)  # the usage is last
    return "\n".join(json.dumps(_without_varying(chunk)) for chunk in chunks)


def _without_varying(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in _VARYING}
    if kept.get("usage"):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept
