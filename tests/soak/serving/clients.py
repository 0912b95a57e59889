"""Random requests, and clients whose answers must be the same under all conditions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llmrun.jobs.bench.serving.driving import Exchange
from tests.soak.driver import Broken, Soak
from tests.support.batching.batch_runs import CHAT, random_lines
from tests.support.serving.http_client import post_patiently
from tests.support.serving.served import Served

COMPLETION = "/v1/completions"

_TOOL = json.loads(
    """{"type": "function", "function": {"name": "weather", "description": "Return the weather of a city.",
    "parameters": {"type": "object", "required": ["city", "days"], "additionalProperties": false, "properties": {
    "city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}}}}}"""
)


class Asked(NamedTuple):
    """A request that clients send."""

    path: str
    body: dict[str, Any]

    @property
    def described(self) -> str:
        """The request in one line."""
        return f"{self.path} {json.dumps(self.body)}"


def random_requests(seed: int, count: int, *, with_tools: bool = False) -> list[Asked]:
    """Return requests of about 10 to 100 tokens, whose answers have at most 80 tokens.

    The requests have common prefixes, several choices, formats, logprobs, stops, streams and, if wanted, tools.
    """
    chance, asked = random.Random(seed), []
    for line in random_lines(seed, 2 * count + 10):
        if not isinstance(line, dict) or "top_p" in line.get("body", {"top_p": 7}):
            continue  # one of the lines with errors
        body = {"temperature": round(chance.uniform(0.2, 2.0), 2), **line["body"]}
        body |= {"seed": chance.randrange(1 << 31), "max_tokens": chance.randint(1, 80)}
        for share, fields in _MORE:
            if chance.random() < share:
                body |= chance.choice(fields)
        kind = chance.random() if "response_format" not in body else 0.5
        if with_tools and line["url"] == CHAT and kind < 0.3:
            body |= {"tools": [_TOOL], "tool_choice": chance.choice(("auto", "required"))}
        elif kind > 0.9:
            body["guided_regex"] = r"[a-z]{3,12}( [a-z]{3,12}){2,5}\."
        asked.append(Asked(line["url"], body))
    return asked[:count]


# Additional fields. Each share of the requests gets one of the sets of fields that follow it.
_MORE: Sequence[tuple[float, Sequence[dict[str, Any]]]] = (
    (0.4, ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})),
    (0.3, ({"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.05}, {"repeat_penalty": 1.1}, {"frequency_penalty": 0.5})),
    (0.2, ({"stop": [".", ","]}, {"stop": ["\n"]}, {"stop": [" the", "and", "a"]})),
)


# --- clients

_VARYING = ("id", "created", "timings")
_BEAT_S = 0.7  # a little longer than the time between two heartbeats of the engine


class Incomplete(Exception):
    """Raised when a response cannot be compared, because it is an error or was cut off."""


class Clients:
    """Clients that send the same requests several times, and compare the answers with those of an idle server."""

    def __init__(self, asked: Sequence[Asked], key: str = "") -> None:
        self.asked, self.expected, self._key = asked, [""] * len(asked), key

    async def learn(self, port: int) -> None:
        """Send one request after another, and remember the answers."""
        for number in range(len(self.asked)):
            self.expected[number] = comparable(await self.ask(port, number))

    async def ask(self, port: int, number: int) -> Exchange:
        """Send one request, again and again while the server says that it is busy."""
        return await post_patiently(port, self.asked[number].path, self.asked[number].body, self._key)

    async def ask_all(self, port: int, numbers: Iterable[int], at_once: int) -> list[Exchange]:
        """Send some requests, at most `at_once` at a time. Every answer must be complete and as expected."""
        room = asyncio.Semaphore(at_once)

        async def ask(number: int) -> Exchange:
            async with room:
                exchange = await self.ask(port, number)
            self.is_complete(number, exchange)
            return exchange

        return await asyncio.gather(*map(ask, numbers))

    def is_complete(self, number: int, exchange: Exchange, *, may_fail: bool = False) -> bool:
        """Return whether an answer is complete. Raises Broken if it is wrong, or incomplete and must not be."""
        try:
            found = comparable(exchange)
        except Incomplete as error:
            if may_fail:
                return False
            raise Broken(f"{error}: {self.asked[number].described}") from error
        if self.expected[number] not in ("", found):
            raise Broken(f"{self.asked[number].described}\n  {self.expected[number]}\n  {found}")
        return True


def context_size(soak: Soak) -> int:
    """Return a context size, which is larger for the scripted model, because its tokens are bytes."""
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
    if not bodies or bodies[-1] != "[DONE]":
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
