"""Many random requests in a small KV cache: none may fail or be paused, and the memory stays within its forecast."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from llmrun.backends.sizing.footprint import Footprint
from llmrun.backends.sizing.kv_bytes import KVBytes
from tests.soak.serving.comparing import Incomplete, comparable
from tests.soak.serving.requests import COMPLETION, random_words
from tests.soak.serving.same import settled_metrics
from tests.support.serving.http_client import post
from tests.support.serving.served import Served, serve

PARALLEL: Final = 16
CLIENTS: Final = 32
MARGIN: Final = 1.05  # of the memory over its forecast
_SHARE: Final = 4  # the cache has a quarter of the tokens that all contexts together could have
_WATCH_S: Final = 0.2


@dataclass
class Crowded:
    """The outcome of a run.

    tight       samples in which the cache had less room than one context, of all `samples`
    waiting     the most sequences in the queue at a time
    memory      the most resident memory of the engine's process in any sample, in bytes
    peak        the same as the system counted it since the process started, with the loading of the model
    helpers     the memory of the processes that the engine has started, at the end
    forecast    the footprint of the model with this cache
    """

    answers: int = 0
    failed: int = 0
    tokens: int = 0
    preemptions: int = 0
    restarts: int = 0
    cached_tokens: int = 0
    samples: int = 0
    tight: int = 0
    waiting: int = 0
    memory: int = 0
    peak: int = 0
    helpers: int = 0
    forecast: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.memory <= MARGIN * self.forecast

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.preemptions and not self.restarts and self.fits

    @property
    def described(self) -> str:
        mb = 1e-6
        return (
            f"{self.answers:,} answers, {self.failed} failed, {self.preemptions} preemptions, {self.restarts} "
            f"restarts, {self.tokens:,} tokens, {self.cached_tokens:,} of them from the cache\n"
            f"the cache had less room than one context in {self.tight:,} of {self.samples:,} samples; at most "
            f"{self.waiting} sequences waited\n"
            f"memory: {self.memory * mb:.1f} MB, with loading {self.peak * mb:.1f} MB, forecast "
            f"{self.forecast * mb:.1f} MB ({100 * self.memory / max(self.forecast, 1) - 100:+.1f} %); "
            f"its helpers {self.helpers * mb:.1f} MB"
        )


def run_crowd(
    model: Sequence[str],
    folder: Path,
    *,
    count: int,
    seed: int,
    context: int = 1024,
    scale: float = 1.0,
    forecast: Callable[[int], int] = lambda kv_tokens: 1 << 62,
    say: Callable[[str], None] = lambda line: None,
) -> Crowded:
    """Send `count` requests with 32 clients at a time.

    model     the arguments of `llmrun serve` that name the model
    context   the context size; the cache has 4 times as many tokens
    scale     makes prompts shorter, for the scripted backend, whose tokens are bytes
    forecast  returns the forecast memory in bytes for a cache with so many tokens
    say       called with a line about the progress
    """
    kv_tokens = PARALLEL * context // _SHARE
    arguments = ["--parallel", str(PARALLEL), "--ctx-size", str(context), "--kv-tokens", str(kv_tokens)]
    chance = random.Random(seed)
    shared = [random_words(chance, 150, 150) for _ in range(5)]
    bodies = [_body(chance, shared, scale) for _ in range(count)]
    found = Crowded(forecast=forecast(kv_tokens))
    with serve(*model, *arguments, "--max-wait", "3600", log=folder / "crowd.log") as server:
        asyncio.run(_ask_all(server, bodies, found, context, say))
        metrics = settled_metrics(server)
        found.preemptions = int(metrics["preemptions_total"])
        found.restarts = int(metrics["engine_restarts_total"])
        found.cached_tokens = int(metrics["cached_tokens_total"])
        found.tokens = int(metrics["prompt_tokens_total"] + metrics["generated_tokens_total"])
        found.peak = _peak(server.engine)
        found.helpers = sum(one.memory_info().rss for one in server.engine.children(recursive=True))
    return found


def forecast_of(path: Path, kv_tokens: int) -> int:
    """Return the memory that llmrun forecasts for a model with a shared cache of so many tokens, in bytes."""
    from llmrun.backends.base import OpenOptions
    from llmrun.backends.cpu.kind import KIND
    from llmrun.gguf.reader import open_gguf

    def footprint(max_sequences: int) -> Footprint:
        with open_gguf(path) as file:
            return KIND.footprint(file, OpenOptions(max_sequences=max_sequences))

    one, all_of_them = footprint(1), footprint(PARALLEL)
    # Sequences share the layers without a window. Those with a window have room for each sequence.
    cache = KVBytes(one.cache.token, all_of_them.cache.windows)
    return replace(all_of_them, cache=cache).total(kv_tokens)


def _body(chance: random.Random, shared: Sequence[str], scale: float) -> dict[str, Any]:
    """Return a request of 10 to 600 tokens. One in twenty answers has no limit but the context."""
    prompt = random_words(chance, 10, 450)
    if chance.random() < 0.4:
        prompt = f"{chance.choice(shared)} {prompt}"
    kind = chance.random()
    body: dict[str, Any] = {"prompt": prompt[: int(len(prompt) * scale)], "seed": chance.randrange(1 << 31)}
    if kind < 0.95:
        body["max_tokens"] = chance.randint(1, 20) if kind < 0.75 else chance.randint(20, 200)
    body["stream"] = chance.random() < 0.5
    return body


async def _ask_all(
    server: Served, bodies: Sequence[dict[str, Any]], found: Crowded, context: int, say: Callable[[str], None]
) -> None:
    waiting = iter(bodies)
    started = time.monotonic()

    async def client() -> None:
        for body in waiting:
            try:
                comparable(await post(server.port, COMPLETION, body))
            except Incomplete as error:
                found.failed += 1
                found.problems.append(f"{error}: {body}")
                say(found.problems[-1][:1000])
            found.answers += 1
            if found.answers % 500 == 0:
                say(f"{found.answers:,} answers, {found.failed} failed, {time.monotonic() - started:.0f} s")

    async def watch() -> None:
        while True:
            metrics = await asyncio.to_thread(server.metrics)
            found.samples += 1
            found.tight += metrics["kv_free_tokens"] < context
            found.waiting = max(found.waiting, int(metrics["requests_waiting"]))
            found.memory = max(found.memory, server.engine.memory_info().rss)
            await asyncio.sleep(_WATCH_S)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    finally:
        watching.cancel()
        await asyncio.wait({watching})


def _peak(process: psutil.Process) -> int:
    """Return the peak of a process's resident memory in bytes, or 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
