"""Many random requests in a small KV cache: none may fail or be preempted, and the memory stays within its forecast."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.kind import KIND
from llmrun.backends.sizing.footprint import Footprint
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.gguf.reader import open_gguf
from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import Incomplete, comparable, model_arguments, settled_metrics
from tests.soak.serving.requests import COMPLETION, random_words
from tests.support.serving.http_client import post
from tests.support.serving.served import Served, serve

_PARALLEL = 16
_CLIENTS = 32
_REQUESTS = 80  # in a case
_CONTEXT = 1024
_KV_TOKENS = _PARALLEL * _CONTEXT // 4  # a quarter of the tokens that all contexts together could have
_MARGIN = 1.05  # of the memory over its forecast
_WATCH_S = 0.2


def crowd(soak: Soak) -> Iterator[Case]:
    """Send 80 requests per case, from 32 clients at a time. The forecast is checked only with a real model."""
    sizes = ["--parallel", str(_PARALLEL), "--ctx-size", str(_CONTEXT), "--kv-tokens", str(_KV_TOKENS)]
    arguments = [*model_arguments(soak, 0.001), *sizes, "--max-wait", "3600"]
    forecast = _forecast(soak.path()) if soak.model else 1 << 62
    shared = [random_words(soak.random("shared"), 150, 150) for _ in range(5)]
    with serve(*arguments, log=soak.folder / "crowd.log") as server:

        def case(number: int) -> str:
            chance = soak.random(number)
            bodies = [_body(chance, shared, scale=1.0 if soak.model else 0.2) for _ in range(_REQUESTS)]
            least_room, memory = asyncio.run(_ask_all(server, bodies))
            soak.counts["cases with less room than a context"] += least_room < _CONTEXT
            if memory > _MARGIN * forecast:
                raise Broken(f"{memory / 1e6:.1f} MB are in use, and the forecast is {forecast / 1e6:.1f} MB")
            return "crowds"

        yield case
        metrics = settled_metrics(server)
        if metrics["preemptions_total"] or metrics["engine_restarts_total"]:
            raise Broken(f"{metrics['preemptions_total']} preemptions, {metrics['engine_restarts_total']} restarts")
    if not soak.counts["cases with less room than a context"]:
        raise Broken("the cache was never nearly full")


def _forecast(path: Path) -> int:
    """Return the memory that llmrun forecasts for a model with this cache, in bytes."""

    def footprint(max_sequences: int) -> Footprint:
        with open_gguf(path) as file:
            return KIND.footprint(file, OpenOptions(max_sequences=max_sequences))

    one, all_of_them = footprint(1), footprint(_PARALLEL)
    # Sequences share the layers without a window. Those with a window have room for each sequence.
    cache = KVBytes(one.cache.token, all_of_them.cache.windows)
    return replace(all_of_them, cache=cache).total(_KV_TOKENS)


def _body(chance: random.Random, shared: Sequence[str], scale: float) -> dict[str, Any]:
    """Return a request of 10 to 600 tokens. One in twenty answers has no limit but the context.

    scale  makes prompts shorter, for the scripted backend, whose tokens are bytes
    """
    prompt = random_words(chance, 10, 450)
    if chance.random() < 0.4:
        prompt = f"{chance.choice(shared)} {prompt}"
    body: dict[str, Any] = {"prompt": prompt[: int(len(prompt) * scale)], "seed": chance.randrange(1 << 31)}
    kind = chance.random()
    if kind < 0.95:
        body["max_tokens"] = chance.randint(1, 20) if kind < 0.75 else chance.randint(20, 200)
    body["stream"] = chance.random() < 0.5
    return body


async def _ask_all(server: Served, bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the fewest free tokens of the cache, and the most resident memory of the engine in bytes."""
    waiting = iter(bodies)
    least_room, memory = 1 << 62, 0

    async def client() -> None:
        for body in waiting:
            try:
                comparable(await post(server.port, COMPLETION, body))
            except Incomplete as error:
                raise Broken(f"{error}: {body}") from error

    async def watch() -> None:
        nonlocal least_room, memory
        while True:
            metrics = await asyncio.to_thread(server.metrics)
            least_room = min(least_room, int(metrics["kv_free_tokens"]))
            memory = max(memory, server.engine.memory_info().rss)
            await asyncio.sleep(_WATCH_S)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    finally:
        watching.cancel()
    return least_room, memory
