"""Clients of a server whose answers must be the same under all conditions, and what the serving profiles share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from llmrun.bench.serving.exchange import Exchange
from tests.soak.driver import Broken, Soak
from tests.soak.serving.requests import Asked
from tests.support.serving.http_client import post_patiently
from tests.support.serving.served import Served, scripted_arguments

_VARYING = ("id", "created", "timings")
_DONE = "[DONE]"
_WATCH_S = 0.1
_BEAT_S = 0.7  # a little longer than the time between two heartbeats of the engine


class Incomplete(Exception):
    """A response that cannot be compared, because it is an error or was cut off."""


class Clients:
    """Clients that ask the same requests several times."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked, self.expected = asked, [""] * len(asked)

    async def learn(self, port: int) -> None:
        """Ask one request after another, to know the answers."""
        for number in range(len(self.asked)):
            self.expected[number] = comparable(await self.ask(port, number))

    async def ask(self, port: int, number: int) -> Exchange:
        """Ask one request, again and again while the server says that it is busy."""
        return await post_patiently(port, self.asked[number].path, self.asked[number].body)

    async def ask_all(self, port: int, numbers: Iterable[int], at_once: int) -> None:
        """Ask some requests, at most `at_once` at a time. Compare the answers that are known."""
        room = asyncio.Semaphore(at_once)

        async def ask(number: int) -> None:
            async with room:
                exchange = await self.ask(port, number)
            try:
                self.compare(number, exchange)
            except Incomplete as error:
                raise Broken(f"{error}: {self.asked[number].described}") from error

        await asyncio.gather(*map(ask, numbers))

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
    if exchange.problem or exchange.status != 200:
        raise Incomplete(f"status {exchange.status} {exchange.problem} {exchange.body[:300].decode(errors='replace')}")
    return comparable_text(exchange.body, exchange.headers.get("content-type", ""))


def comparable_text(body: bytes, content_type: str) -> str:
    """Return the same for the body of a response with status 200. Raises Incomplete."""
    if not content_type.startswith("text/event-stream"):
        return json.dumps(_without_varying(json.loads(body)))
    text = body.decode()
    bodies = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if not bodies or bodies[-1] != _DONE:
        raise Incomplete(f"a stream without its end: {text[-300:]}")
    chunks = [json.loads(each) for each in bodies[:-1]]
    if len({chunk["id"] for chunk in chunks}) != 1:
        raise Incomplete("the chunks of a stream have several ids")
    chunks.sort(key=_choice)
    return "\n".join(json.dumps(_without_varying(chunk)) for chunk in chunks)


def _choice(chunk: dict[str, Any]) -> int:
    """Return the number of a chunk's choice, or a large one for the chunk with the usage."""
    return int(chunk["choices"][0]["index"]) if chunk["choices"] else 1 << 30


def _without_varying(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in _VARYING}
    if kept.get("usage"):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept
