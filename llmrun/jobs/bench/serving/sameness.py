"""Compares a server's answers to the same prompts under different load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from llmrun.jobs.bench.serving.arrivals import arrival_times
from llmrun.jobs.bench.serving.plan import COMPARED_PROMPTS
from llmrun.jobs.bench.serving.record import Record
from llmrun.jobs.bench.serving.session import Session, refuse_failures
from llmrun.jobs.bench.serving.workloads import GREEDY, SEEDED


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
