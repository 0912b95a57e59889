"""The state that all parts of a serving benchmark share: a server that was probed while it was idle.

A probe shows what the server supports and how fast it is. How many requests the server is working on is read from its
metrics, its slots or its health.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import Call, unfinished_in_metrics
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.bench.measuring.pool import BenchReporter
from llmrun.jobs.bench.serving.driving import REJECTED, Driver, Planned, Sender
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.record import Record, parsed
from llmrun.jobs.bench.serving.workloads import RequestMaker

if TYPE_CHECKING:
    from llmrun.engine.remote.client import RemoteModel

_LOOKS_S = 0.02


async def unfinished(sender: Sender) -> tuple[int, str] | None:
    """Return how many requests run or wait on the server and the path that says so, or None if no path does."""
    for path, read in (("/metrics", unfinished_in_metrics), ("/slots", _in_slots), ("/health", _in_health)):
        found = await sender.get(path)
        if found.status == 200 and not found.problem:
            count = read(found.body.decode(errors="replace"))
            if count is not None:
                return count, path
    return None


async def wait_until_idle(sender: Sender, limit_s: float) -> tuple[int, str, float] | None:
    """Wait until nothing runs on the server, for at most `limit_s` seconds.

    Returns the number of requests that still run or wait, the path that says so, and the seconds that have passed, or
    None if the server does not report its requests.
    """
    started = time.perf_counter()
    while (found := await unfinished(sender)) is not None:
        passed = time.perf_counter() - started
        if found[0] == 0 or passed > limit_s:
            return *found, passed
        await asyncio.sleep(_LOOKS_S)
    return None


def _in_slots(text: str) -> int | None:
    slots = _json(text)
    if not isinstance(slots, list) or not all(isinstance(slot, dict) and "is_processing" in slot for slot in slots):
        return None
    return sum(bool(slot["is_processing"]) for slot in slots) if slots else None


def _in_health(text: str) -> int | None:
    body = _json(text)
    counts = [body.get(name) for name in ("running", "waiting")] if isinstance(body, dict) else []
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_TOKENS = 16  # the length of the answers
_FIRST = 1 << 33  # the number of the first prompt, which no run uses
_MOST_EVENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of probing a server.

    ttft, tpot     seconds on an idle server
    left_out       the fields beyond OpenAI's API that the server rejects
    counts_tokens  whether the server reports token counts in streams
    """

    ttft: float
    tpot: float
    left_out: tuple[str, ...]
    counts_tokens: bool


def probed(model: RemoteModel, maker: RequestMaker, rounds: int = 2) -> Probe:
    """Send a request to warm up, then `rounds` requests of the plan's prompt length, one at a time.

    Raises NetworkError, ModelNotFound and ContextExceeded.
    """
    _alone(model, maker, _FIRST, 2)
    found = [_alone(model, maker, _FIRST + 1 + number, _TOKENS) for number in range(rounds)]
    if any(probe.ttft == math.inf for probe in found):
        raise NetworkError(f"nothing to measure: {model.endpoint.host}: an answer had no text")
    best = min(found, key=lambda probe: probe.ttft)
    return replace(best, tpot=min(probe.tpot for probe in found))


def _alone(model: RemoteModel, maker: RequestMaker, index: int, tokens: int) -> Probe:
    wire = maker.wire(maker.words(index, maker.plan.prompt), min(tokens, maker.plan.generate))
    sent = time.perf_counter()
    moments, counts_tokens = [], False
    for chunk in model.stream(wire.path, wire.body, wire.extras, Call(), most_events=_MOST_EVENTS):
        if chunk.text or chunk.reasoning:
            moments.append(chunk.arrived)
        counts_tokens = counts_tokens or chunk.usage is not None
    ttft = moments[0] - sent if moments else math.inf
    tpot = (moments[-1] - moments[0]) / max(1, len(moments) - 1) if moments else 0.0
    return Probe(ttft, tpot, model.left_out, counts_tokens)


_CALIBRATION = 1 << 31  # the number of the first prompt of a calibration, which no run uses
_CALIBRATION_WAVES = 3


@dataclass(frozen=True, slots=True)
class Capacity:
    """The requests per second that a server completed with a number of clients."""

    rate: float
    clients: int


@dataclass(slots=True)
class Session:
    """A server that has been probed.

    interrupted  whether Ctrl-C ended a loop early; the next loop then raises KeyboardInterrupt
    """

    plan: ServingPlan
    maker: RequestMaker
    sender: Sender
    probe: Probe
    teller: Teller
    reporter: BenchReporter
    interrupted: bool = False

    async def open_loop(self, planned: Iterable[Planned], times: Sequence[float], words: str = "") -> list[Record]:
        """Send each request at its time in seconds from now. Return the requests that have ended."""
        driver = Driver(self.sender)
        return await self._driven(driver, driver.open_loop(planned, times), words, len(times))

    async def closed_loop(
        self, planned: Iterable[Planned], concurrency: int, words: str = "", *, duration: float | None = None
    ) -> list[Record]:
        """Keep `concurrency` requests running. Return the requests that have ended."""
        driver = Driver(self.sender)
        if duration is not None:
            loop = driver.closed_loop(iter(planned), concurrency, duration=duration)
            return await self._driven(driver, loop, words, None)
        waiting = [*planned]
        return await self._driven(driver, driver.closed_loop(iter(waiting), concurrency), words, len(waiting))

    async def capacity(self) -> Capacity:
        """Measure how many requests of the workload the server completes per second with `plan.concurrency` clients.

        The first request of each client is not counted, because an idle server starts all of them at once. If the
        server rejects some of the clients with a 429, half as many try again. Raises NetworkError if a request fails.
        """
        clients, first = self.plan.concurrency, _CALIBRATION
        while True:
            planned = [self.maker.request(first + number) for number in range(_CALIBRATION_WAVES * clients)]
            records = await self.closed_loop(planned, clients, f"measuring the capacity with {clients} clients")
            if len(records) < len(planned):
                raise KeyboardInterrupt
            if clients == 1 or not any(one.status == REJECTED for record in records for one in record.tries):
                break
            clients, first = clients // 2, first + len(planned)
        refuse_failures(records, self.maker.model, self.teller)
        ends = sorted(record.ended for record in records)
        return Capacity((len(ends) - clients) / max(ends[-1] - ends[clients - 1], 1e-6), clients)

    async def _driven(
        self, driver: Driver, loop: Coroutine[Any, Any, None], words: str, total: int | None
    ) -> list[Record]:
        if self.interrupted:
            loop.close()
            raise KeyboardInterrupt
        started = time.perf_counter()

        def told() -> tuple[str, float | None]:
            done = f"{len(driver.ended):,}" if total is None else f"{len(driver.ended):,} of {total:,}"
            said = f"{done} requests done, {driver.running:,} running"
            return f"{words}: {said}" if words else said, None if not total else len(driver.ended) / total

        self.reporter.watch(told)
        try:
            await loop
        except asyncio.CancelledError:
            self.interrupted = True
        return [parsed(sent, started, self.teller) for sent in driver.ended]


def refuse_failures(records: Sequence[Record], model: str, teller: Teller) -> None:
    """Raise NetworkError if a request failed where none may fail."""
    failed = [record for record in records if record.problem]
    if failed:
        seen = f"{failed[0].problem}: {failed[0].words}" if failed[0].words else failed[0].problem
        raise NetworkError(f"{len(failed):,} of {len(records):,} requests failed: {model} @ {teller.host}: {seen}")
