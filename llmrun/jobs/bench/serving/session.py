"""The state that all parts of a serving benchmark share: a server that was probed while it was idle.

A probe shows what the server supports and how fast it is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import Call
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.bench.measuring.pool import BenchReporter
from llmrun.jobs.bench.serving.driving import REJECTED, Driver, Planned, Sender
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.record import Record, parsed
from llmrun.jobs.bench.serving.workloads import RequestMaker

if TYPE_CHECKING:
    from llmrun.engine.remote.client import RemoteModel

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
