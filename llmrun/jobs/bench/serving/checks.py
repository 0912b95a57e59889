"""Checks a server under load: clients that leave, answers that should not change, and waits that it predicted.

Clients leave while they wait, during the prefill and during the answer. Two kinds of responses predict a wait: a 429
with Retry-After, and an accepted request with the header x-llmrun-wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from llmrun.jobs.bench.serving.driving import Leave, Planned, arrival_times
from llmrun.jobs.bench.serving.plan import CANCELLED_REQUESTS, COMPARED_PROMPTS
from llmrun.jobs.bench.serving.record import Record
from llmrun.jobs.bench.serving.session import Session, refuse_failures, wait_until_idle
from llmrun.jobs.bench.serving.workloads import GREEDY, SEEDED

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


@dataclass(frozen=True, slots=True)
class Condition:
    """The answers under one condition, compared with those of requests that ran alone.

    compared   the number of answers that both conditions have, for each kind of sampling
    different  the number of answers that differ, for each kind of sampling
    failed     requests without an answer
    prompts    the numbers of the prompts whose answers differ
    """

    name: str
    compared: Mapping[str, int]
    different: Mapping[str, int]
    failed: int
    prompts: tuple[int, ...]


def compare(name: str, records: Sequence[Record], alone: Sequence[Record]) -> Condition:
    """Compare the answers under one condition with those of requests that ran alone, by the numbers of the prompts."""
    expected = {record.number: record for record in alone if record.digest}
    both = [record for record in records if record.digest and record.number in expected]
    unequal = [record for record in both if record.digest != expected[record.number].digest]
    return Condition(
        name,
        compared={kind: sum(record.group == kind for record in both) for kind in (GREEDY, SEEDED)},
        different={kind: sum(record.group == kind for record in unequal) for kind in (GREEDY, SEEDED)},
        failed=sum(not record.digest for record in records),
        prompts=tuple(sorted(record.number for record in unequal)),
    )


async def compare_under_load(session: Session) -> tuple[list[Condition], list[Record]]:
    """Send the same prompts under all conditions. Return the comparisons, and the requests of the open loop.

    Raises NetworkError if a request fails although it runs alone.
    """
    plan, maker = session.plan, session.maker
    planned = [maker.request(number) for number in range(plan.requests or COMPARED_PROMPTS)]
    alone = await session.closed_loop(planned, 1, "alone")
    refuse_failures(alone, maker.model, session.teller)
    again = await session.closed_loop(planned, 1, "alone again")
    together = await session.closed_loop(planned, plan.concurrency, "together")
    await session.closed_loop([maker.completion(0, maker.prefix(), tokens=1)], 1, "warming the prefix")
    shuffled = Random(plan.seed).sample(planned, len(planned))
    warmed = await session.closed_loop(shuffled, plan.concurrency, "with a cached prefix")
    # The capacity is at least what one client gets, and an open loop at twice that rate has a queue.
    capacity = len(together) / max((record.ended for record in together), default=1.0)
    rate = 2 * capacity if plan.rate is None else plan.rate.value * (capacity if plan.rate.is_multiple else 1)
    times = arrival_times(rate, plan.seed, requests=len(planned), burstiness=plan.burstiness)
    opened = await session.open_loop(planned, times, "open loop")
    conditions = [
        compare("alone again", again, alone),
        compare(f"{plan.concurrency} at once", together, alone),
        compare("prefix cached, other order", warmed, alone),
        compare(f"open loop at {rate:.3g} requests/s", opened, alone),
    ]
    return conditions, opened


# Shorter actual waits count as this long against Retry-After, which is in whole seconds, and are not compared with
# x-llmrun-wait, because the time of the prefill is only estimated.
SHORTEST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """The accuracy of Retry-After. Times are in seconds.

    rejections       all 429s, of first and of later attempts
    with_time        those that had a Retry-After
    obeyed           requests that were sent again after the time
    accepted         the requests among them whose second attempt was accepted
    promised         the median and the range of Retry-After
    error            the median of |promised - actual| / actual, where actual is the time from a request's first 429 to
                     its first text, or None. A promise that was too short leads to more 429s and a longer actual wait
    newcomer_error   the same, where actual is the time from the 429 to the first text of any request that was sent
                     later and accepted at once. It reveals promises that were too long, which `error` cannot see
    """

    rejections: int
    with_time: int
    obeyed: int
    accepted: int
    promised: tuple[float, float, float] | None
    error: float | None
    newcomer_error: float | None


@dataclass(frozen=True, slots=True)
class PredictedWaits:
    """The accuracy of the predictions for accepted requests.

    predicted  the accepted requests with a prediction
    compared   those that waited for at least SHORTEST_WAIT_S
    error      the median of |predicted - actual| / actual
    within_2x  the share of those whose prediction is within a factor of 2
    """

    predicted: int
    compared: int
    error: float | None
    within_2x: float | None


def judge_retry_after(records: Sequence[Record]) -> RetryAfter:
    """Compare Retry-After with what happened."""
    rejections = [one for record in records for one in record.tries if one.status == 429]
    waits = sorted(one.retry_after for one in rejections if one.retry_after is not None)
    obeyed = [record for record in records if len(record.tries) > 1]
    errors, newcomer_errors = [], []
    at_once = sorted(
        (record.sent, record.moments[0]) for record in records if record.succeeded and len(record.tries) == 1
    )
    for record in obeyed:
        rejected = record.tries[0]
        promised = rejected.retry_after or 0.0
        if record.succeeded:
            errors.append(_relative(promised, record.moments[0] - rejected.ended))
        first = min((first for sent, first in at_once if sent > rejected.ended), default=None)
        if first is not None:
            newcomer_errors.append(_relative(promised, first - rejected.ended))
    return RetryAfter(
        rejections=len(rejections),
        with_time=len(waits),
        obeyed=len(obeyed),
        accepted=sum(record.tries[1].status != 429 for record in obeyed),
        promised=(statistics.median(waits), waits[0], waits[-1]) if waits else None,
        error=_median(errors),
        newcomer_error=_median(newcomer_errors),
    )


def judge_predicted_waits(records: Sequence[Record], prefill_s: float) -> PredictedWaits | None:
    """Compare the predictions for accepted requests with their waits. Return None if there are no predictions.

    The wait of a request is its time to the first text since it was sent, less `prefill_s`, the time to the first text
    on an idle server.
    """
    pairs = [
        (record.tries[-1].predicted_wait, record.moments[0] - record.tries[-1].sent - prefill_s)
        for record in records
        if record.succeeded and record.tries[-1].predicted_wait is not None
    ]
    if not pairs:
        return None
    compared = [(said, wait) for said, wait in pairs if said is not None and wait >= SHORTEST_WAIT_S]
    good = sum(wait / 2 <= said <= wait * 2 for said, wait in compared)
    return PredictedWaits(
        predicted=len(pairs),
        compared=len(compared),
        error=_median([_relative(said, wait) for said, wait in compared]),
        within_2x=good / len(compared) if compared else None,
    )


def _relative(promised: float, actual: float) -> float:
    actual = max(actual, SHORTEST_WAIT_S)
    return abs(promised - actual) / actual


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
