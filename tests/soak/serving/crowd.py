"""Many random requests in a small KV cache: none may fail or be preempted, and the memory stays within its forecast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.kind import KIND
from llmrun.backends.sizing.footprint import Footprint
from llmrun.backends.sizing.kv_bytes import KVBytes
from llmrun.gguf.reader import open_gguf
from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import Clients, context_size, model_arguments, settled_metrics, watched
from tests.soak.serving.requests import random_requests
from tests.support.serving.served import Served, serve

_PARALLEL = 16
_CLIENTS = 32
_REQUESTS = 80  # in a case
_ENDLESS_EVERY = 20  # of so many answers, one is limited only by the context
_MARGIN = 1.05  # of the memory over its forecast


def crowd(soak: Soak) -> Iterator[Case]:
    """Send 80 requests per case, from 32 clients at a time. The forecast is checked only with a real model."""
    context = context_size(soak)
    kv_tokens = _PARALLEL * context // 4  # a quarter of the tokens that all contexts together could have
    sizes = ["--parallel", str(_PARALLEL), "--ctx-size", str(context), "--kv-tokens", str(kv_tokens)]
    forecast = _forecast(soak.path(), kv_tokens) if soak.model else 1 << 62
    with serve(*model_arguments(soak, 0.001), *sizes, "--max-wait", "3600", log=soak.folder / "crowd.log") as server:

        def case(number: int) -> str:
            clients = Clients(random_requests(soak.seed_of(number), _REQUESTS, with_tools=False))
            for asked in clients.asked[::_ENDLESS_EVERY]:
                del asked.body["max_tokens"]
            least_room, memory = asyncio.run(_ask_all(server, clients))
            soak.counts["cases with less room than a context"] += least_room < context
            if memory > _MARGIN * forecast:
                raise Broken(f"{memory / 1e6:.1f} MB are in use, and the forecast is {forecast / 1e6:.1f} MB")
            return "crowds"

        yield case
        metrics = settled_metrics(server)
        if metrics["preemptions_total"] or metrics["engine_restarts_total"]:
            raise Broken(f"{metrics['preemptions_total']} preemptions, {metrics['engine_restarts_total']} restarts")
    if not soak.counts["cases with less room than a context"]:
        raise Broken("the cache was never nearly full")


async def _ask_all(server: Served, clients: Clients) -> tuple[float, float]:
    """Return the fewest free tokens of the cache, and the most resident memory of the engine in bytes."""
    async with (
        watched(lambda: server.metrics()["kv_free_tokens"]) as free,
        watched(lambda: server.engine.memory_info().rss) as memory,
    ):
        await clients.ask_all(server.port, range(_REQUESTS), _CLIENTS)
    return min(free), max(memory)


def _forecast(path: Path, kv_tokens: int) -> int:
    """Return the memory that llmrun forecasts for a model with a shared cache of so many tokens, in bytes."""

    def footprint(max_sequences: int) -> Footprint:
        with open_gguf(path) as file:
            return KIND.footprint(file, OpenOptions(max_sequences=max_sequences))

    one, all_of_them = footprint(1), footprint(_PARALLEL)
    # Sequences share the layers without a window. Those with a window have room for each sequence.
    cache = KVBytes(one.cache.token, all_of_them.cache.windows)
    return replace(all_of_them, cache=cache).total(kv_tokens)
