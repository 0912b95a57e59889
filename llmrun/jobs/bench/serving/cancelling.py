"""Clients that leave while they wait, during the prefill and during the answer, and what the server does afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from llmrun.jobs.bench.serving.busyness import wait_until_idle
from llmrun.jobs.bench.serving.driver import Planned
from llmrun.jobs.bench.serving.exchange import Leave
from llmrun.jobs.bench.serving.plan import CANCELLED_REQUESTS
from llmrun.jobs.bench.serving.record import Record
from llmrun.jobs.bench.serving.session import Session

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
GRACE_S = 10.0  # A server that still runs requests after this time has not noticed that the clients left.
_EVENTS = 4  # A client leaves a stream after this many events, of which the first may have no text.
_DECODING_CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """The clients that left in one phase.

    left   the clients that left before their answer ended
    ended  those whose request ended first, although they meant to leave
    """

    name: str
    streams: bool
    left: int
    ended: int


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The results of the `cancel` workload.

    unfinished      requests that run or wait on the server after GRACE_S; None if the server does not report them
    source          the path that reports them, such as "/metrics"
    idle_after      seconds until the server was idle
    ttft_before, ttft_after  the time to the first text of a single request, before and after
    """

    phases: tuple[Phase, ...]
    unfinished: int | None
    source: str
    idle_after: float
    ttft_before: float
    ttft_after: float | None


async def leave_early(session: Session) -> Cancelling:
    """Send requests whose clients leave, wait until the server is idle, and ask once more."""
    total = session.plan.requests or CANCELLED_REQUESTS
    numbers = count()
    records: list[Record] = []
    for name, clients in ((DECODE, _DECODING_CLIENTS), (PREFILL, 1), (QUEUE, total)):
        planned = [_leaving(session, name, number) for number in islice(numbers, max(2, total // 3))]
        records += await session.closed_loop(planned, clients, f"leaving: {name}")
    session.reporter.progress("waiting until the server is idle")
    found = await wait_until_idle(session.sender, GRACE_S)
    after = await session.closed_loop([session.maker.request(next(numbers))], 1, "asking once more")
    unfinished, source, idle_after = found or (None, "", 0.0)
    answered = next((record for record in after if record.succeeded), None)
    return Cancelling(
        phases=tuple(_phase(records, name, streams) for name in (QUEUE, PREFILL, DECODE) for streams in (True, False)),
        unfinished=unfinished,
        source=source,
        idle_after=idle_after,
        ttft_before=session.probe.ttft,
        ttft_after=answered.moments[0] - answered.due if answered else None,
    )


def _leaving(session: Session, phase: str, number: int) -> Planned:
    """Return a request whose client leaves in a phase. Requests with an even number are streamed."""
    probe, maker = session.probe, session.maker
    streams = number % 2 == 0
    if phase == QUEUE:  # All are sent at once, so that most of them wait.
        leave = Leave(seconds=Random(number).uniform(0, 2 * probe.ttft))
    elif phase == PREFILL:
        leave = Leave(seconds=probe.ttft / 2)
    elif streams:
        leave = Leave(events=_EVENTS)
    else:
        leave = Leave(seconds=probe.ttft + probe.tpot * session.plan.generate / 2)
    text = maker.words(number, session.plan.prompt)
    return maker.completion(number, text, _group(phase, streams), leave=leave, streams=streams)


def _group(phase: str, streams: bool) -> str:
    return f"{phase}, {'streaming' if streams else 'not streaming'}"


def _phase(records: Sequence[Record], name: str, streams: bool) -> Phase:
    of_it = [record for record in records if record.group == _group(name, streams)]
    left = sum(record.left for record in of_it)
    return Phase(name, streams, left, len(of_it) - left)
