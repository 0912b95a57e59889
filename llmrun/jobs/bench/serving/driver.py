"""Drives requests: an open loop sends each request at its time, a closed loop a fixed number of requests at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmrun.jobs.bench.serving.exchange import Exchange, Leave
from llmrun.jobs.bench.serving.sender import Sender

_MOST_TRIES = 10
_MOST_RETRY_AFTER_S = 600.0
REJECTED = 429
WAIT_HEADER = "x-llmrun-wait"  # the predicted seconds until the first row of the request runs


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send.

    number  the number of its prompt
    group   a name for requests whose times are reported together
    leave   when the client disconnects before the answer has ended; None if it stays
    """

    path: str
    content: bytes
    number: int = 0
    group: str = ""
    leave: Leave | None = None


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt to send a request. Times are from time.perf_counter.

    ended           when the response ended
    retry_after     the wait in seconds that a 429 asked for, or None
    predicted_wait  the wait in seconds that the server predicted for an accepted request, or None
    """

    sent: float
    ended: float
    status: int
    retry_after: float | None
    predicted_wait: float | None


@dataclass(slots=True)
class Sent:
    """A request that has ended. `due` is the time when it should have been sent, from time.perf_counter."""

    planned: Planned
    due: float
    tries: list[Try]
    last: Exchange


@dataclass(slots=True)
class Driver:
    """Sends requests and collects the results, which remain available if the run is interrupted.

    A request that gets a 429 with Retry-After is sent again after that time.
    """

    sender: Sender
    ended: list[Sent] = field(default_factory=list)
    running: int = 0

    async def open_loop(self, planned: Iterable[Planned], times: Sequence[float]) -> None:
        """Send each request at its time in seconds from now, and wait until all have ended."""
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for one, at in zip(planned, times, strict=True):  # Each request is created before its time.
                due = started + at
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self.ask(one, due))

    async def closed_loop(self, planned: Iterator[Planned], concurrency: int, *, duration: float = math.inf) -> None:
        """Keep `concurrency` requests running until there are no more, or for `duration` seconds.

        The requests that are running after `duration` seconds are completed.
        """
        until = time.perf_counter() + duration

        async def client() -> None:
            while time.perf_counter() < until and (one := next(planned, None)) is not None:
                await self.ask(one, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def ask(self, planned: Planned, due: float) -> None:
        """Send a request until it is not rejected with Retry-After, and record it."""
        self.running += 1
        tries: list[Try] = []
        try:
            while True:
                last = await self.sender.post(planned.path, planned.content, planned.leave or Leave())
                wait = retry_after(last.headers) if last.status == REJECTED else None
                tries.append(Try(last.sent, last.ended, last.status, wait, _seconds(last.headers, WAIT_HEADER)))
                if wait is None or len(tries) == _MOST_TRIES:
                    break
                await asyncio.sleep(wait)
        finally:
            self.running -= 1
        self.ended.append(Sent(planned, due, tries, last))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait in seconds that a server asks for, or None. Dates, which no inference server sends, are None."""
    milliseconds = _seconds(headers, "retry-after-ms")
    wait = _seconds(headers, "retry-after") if milliseconds is None else milliseconds / 1e3
    return None if wait is None or wait > _MOST_RETRY_AFTER_S else wait


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(headers.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
