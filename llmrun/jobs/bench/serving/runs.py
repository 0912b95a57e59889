"""Runs the serving benchmark on one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import KEY_VARIABLE, RemoteModel
from llmrun.engine.remote.stream import Teller
from llmrun.engine.remote.url import parse_endpoint
from llmrun.jobs.bench.measuring.reporter import BenchReporter
from llmrun.jobs.bench.serving.arrivals import arrival_times
from llmrun.jobs.bench.serving.cancelling import Cancelling, leave_early
from llmrun.jobs.bench.serving.figures import Figures, Spread, duration_of, figures, spread
from llmrun.jobs.bench.serving.plan import CANCEL, SAME, ServingPlan
from llmrun.jobs.bench.serving.probing import Probe, probed
from llmrun.jobs.bench.serving.promises import PredictedWaits, RetryAfter, judge_predicted_waits, judge_retry_after
from llmrun.jobs.bench.serving.record import Record
from llmrun.jobs.bench.serving.sameness import Condition, compare_under_load
from llmrun.jobs.bench.serving.sender import Sender
from llmrun.jobs.bench.serving.session import Capacity, Session, refuse_failures
from llmrun.jobs.bench.serving.workloads import RequestMaker, groups_of

_LATE_S = 0.01  # Requests that are sent later than this disturb the measurement.


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The results of a run. Figures of a part that the workload does not have are empty or None.

    rate       the rate of the open loop in requests per second; None for a closed loop
    capacity   the measured capacity; None if it was not needed
    groups     the name of a group of requests -> its figures; the first one has all requests
    lateness   how late the client sent requests of an open loop
    messages   kind of failure -> an example of the server's message
    """

    model: str
    host: str
    plan: ServingPlan
    probe: Probe
    rate: float | None = None
    capacity: Capacity | None = None
    groups: Mapping[str, Figures] = field(default_factory=dict)
    lateness: Spread | None = None
    retry_after: RetryAfter | None = None
    predicted_waits: PredictedWaits | None = None
    conditions: tuple[Condition, ...] = ()
    cancelling: Cancelling | None = None
    messages: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def notes(self) -> list[str]:
        """Remarks about the server and the client that matter for the figures."""
        found = []
        if self.probe.left_out:
            found.append(f"{self.host} does not support {', '.join(self.probe.left_out)}: answers may be shorter")
        if not self.probe.counts_tokens:
            found.append(f"{self.host} does not report token counts: pieces of text are counted instead")
        if self.lateness is not None and self.lateness.p99 > _LATE_S:
            found.append(f"this machine is too busy: 1% of requests were sent at least {self.lateness.p99:.3f} s late")
        return found


def measure_serving(plan: ServingPlan, address: str, reporter: BenchReporter, *, offline: bool) -> ServingResult:
    """Run a plan on the model at `URL#MODEL`.

    Raises NetworkError, ModelNotFound, ContextExceeded and UsageError if the server cannot be used, NetworkError if no
    request succeeds, and KeyboardInterrupt if no request has ended.
    """
    model = RemoteModel.open(parse_endpoint(address), offline=offline)
    try:
        maker = RequestMaker(plan, model.endpoint.model)
        reporter.progress(f"{model.endpoint.host}: warming up")
        probe = probed(model, maker)
    finally:
        model.close()
    key = os.environ.get(KEY_VARIABLE) or None
    session = Session(
        plan,
        replace(maker, left_out=probe.left_out),
        Sender(model.endpoint, key),
        probe,
        Teller(model.endpoint.host, key),
        reporter,
    )
    result = asyncio.run(_run(session))
    return replace(result, model=model.endpoint.model, host=model.endpoint.host, interrupted=session.interrupted)


async def _run(session: Session) -> ServingResult:
    await session.sender.connect()
    result = ServingResult("", "", session.plan, session.probe)
    if session.plan.workload == CANCEL:
        return replace(result, cancelling=await leave_early(session))
    if session.plan.workload == SAME:
        conditions, records = await compare_under_load(session)
        return replace(_with_figures(result, session, records), conditions=tuple(conditions))
    return await _load(session, result)


async def _load(session: Session, result: ServingResult) -> ServingResult:
    """Send the requests of a workload in an open or a closed loop."""
    plan, maker = session.plan, session.maker
    if plan.rate is None:
        numbers = count() if plan.requests is None else range(plan.requests)
        planned = map(maker.request, numbers)
        records = await session.closed_loop(planned, plan.concurrency, duration=plan.sending_s)
        return _with_figures(result, session, records)
    capacity = await session.capacity() if plan.rate.is_multiple else None
    rate = plan.rate.value * (capacity.rate if capacity else 1.0)
    times = arrival_times(
        rate, plan.seed, requests=plan.requests, duration=plan.sending_s, burstiness=plan.burstiness
    ) or [0.0]
    records = await session.open_loop(map(maker.request, range(len(times))), times)
    late = spread(record.sent - record.due for record in records) if records else None
    return replace(_with_figures(result, session, records), rate=rate, capacity=capacity, lateness=late)


def _with_figures(result: ServingResult, session: Session, records: Sequence[Record]) -> ServingResult:
    if not records:
        raise KeyboardInterrupt
    if not any(record.succeeded for record in records):
        refuse_failures(records, session.maker.model, session.teller)
        raise NetworkError(f"nothing to measure: {session.teller.host}: no request succeeded")
    seconds = duration_of(records)
    return replace(
        result,
        groups={
            group.name: figures(group.records, session.plan.limits, seconds, group.gaps)
            for group in groups_of(session.plan.workload, records)
        },
        retry_after=judge_retry_after(records),
        predicted_waits=judge_predicted_waits(records, session.probe.ttft),
        messages={record.problem: record.words for record in records if record.problem and record.words},
    )
