"""Runs the serving benchmark on one server, and formats its results as JSON and as text.

The JSON uses the names of `vllm bench serve` where it has them. The text is for both the terminal and Markdown.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from llmrun.base.amounts import counted, format_number, format_percent, format_seconds, format_seconds_briefly
from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import KEY_VARIABLE, RemoteModel
from llmrun.engine.remote.request import parse_endpoint
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.bench.measuring.pool import BenchReporter
from llmrun.jobs.bench.serving.checks import (
    GRACE_S,
    SHORTEST_WAIT_S,
    Cancelling,
    Condition,
    PredictedWaits,
    RetryAfter,
    compare_under_load,
    judge_predicted_waits,
    judge_retry_after,
    leave_early,
)
from llmrun.jobs.bench.serving.driving import Sender, arrival_times
from llmrun.jobs.bench.serving.plan import CANCEL, METRICS, MIXED, OVERLOAD, SAME, ServingPlan, goodput_words
from llmrun.jobs.bench.serving.record import Figures, Record, Spread, duration_of, figures, spread
from llmrun.jobs.bench.serving.session import Capacity, Probe, Session, probed, refuse_failures
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


_VLLM_NAMES = {"e2e": "e2el"}


def to_row(result: ServingResult) -> dict[str, Any]:
    """Return a run as a JSON object. Times whose names end in `_ms` are in milliseconds, all others in seconds."""
    plan, late = result.plan, result.lateness
    first = next(iter(result.groups.values()), None)
    return {
        "backend": "openai",
        "model_id": result.model,
        "host": result.host,
        "workload": plan.workload,
        "seed": plan.seed,
        "n_prompt": plan.prompt,
        "n_gen": plan.generate,
        "n_prefix": plan.prefix,
        "request_rate": result.rate,
        "burstiness": plan.burstiness,
        "capacity": None if result.capacity is None else asdict(result.capacity),
        "concurrency": plan.concurrency if result.rate is None else None,
        "goodput_slo_ms": {name: limit * 1e3 for name, limit in plan.limits.items()},
        **({} if first is None else _figures(first)),
        "groups": {name: _figures(found) for name, found in result.groups.items()},
        "messages": dict(result.messages),
        "idle_ttft_ms": result.probe.ttft * 1e3,
        "idle_tpot_ms": result.probe.tpot * 1e3,
        "late_ms": None if late is None else {"p50": late.p50 * 1e3, "p99": late.p99 * 1e3},
        "retry_after": None if result.retry_after is None else asdict(result.retry_after),
        "predicted_waits": None if result.predicted_waits is None else asdict(result.predicted_waits),
        "same": [asdict(condition) for condition in result.conditions],
        "cancel": None if result.cancelling is None else asdict(result.cancelling),
        "notes": result.notes,
        "interrupted": result.interrupted,
    }


def _figures(found: Figures) -> dict[str, Any]:
    row: dict[str, Any] = {
        "duration": found.seconds,
        "completed": found.completed,
        "failed": found.rejected + sum(found.failed.values()),
        "rejected": found.rejected,
        "failures": dict(found.failed),
        "total_input_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "total_output_tokens": found.output_tokens,
        "request_throughput": found.per_second(found.completed),
        "output_throughput": found.per_second(found.output_tokens),
        "total_token_throughput": found.per_second(found.prompt_tokens + found.output_tokens),
        "request_goodput": None if found.good is None else found.per_second(found.good),
        "good": found.good,
    }
    for metric, times in found.times.items():
        name = _VLLM_NAMES.get(metric, metric)
        row |= {
            f"mean_{name}_ms": times.mean * 1e3,
            f"median_{name}_ms": times.p50 * 1e3,
            f"std_{name}_ms": times.stddev * 1e3,
            f"p90_{name}_ms": times.p90 * 1e3,
            f"p99_{name}_ms": times.p99 * 1e3,
        }
    return row


TIMES_HEAD = ("", "time", "count", "mean", "p50", "p90", "p99")
CONDITIONS_HEAD = ("condition", "greedy answers\nthat differ", "seeded answers\nthat differ")


def heading(result: ServingResult) -> str:
    """Return a line that says what ran."""
    plan = result.plan
    words = [f"{result.model} @ {result.host}", plan.workload, f"{plan.prompt} in, {plan.generate} out"]
    if plan.prefix:
        long = f"long prompts {plan.prompt + plan.prefix}"
        words.append(long if plan.workload == MIXED else f"prefix {plan.prefix}")
    if result.rate is not None:
        words.append(f"open loop at {format_number(result.rate)} requests/s")
    elif plan.workload not in (CANCEL, SAME):
        words.append(f"{counted(plan.concurrency, 'client')}")
    return "  ".join([*words, f"seed {plan.seed}"])


def times_rows(result: ServingResult) -> list[list[str]]:
    """Return a row of TIMES_HEAD for each metric of each group."""
    return [
        [name, metric.upper(), f"{spread.count:,}", *map(format_seconds_briefly, _columns(spread))]
        for name, found in result.groups.items()
        for metric in METRICS
        if (spread := found.times.get(metric)) is not None
    ]


def condition_rows(conditions: Sequence[Condition]) -> list[list[str]]:
    """Return rows for the columns: condition, differing greedy answers, differing seeded answers."""
    return [
        [one.name, *(f"{one.different[kind]:,} of {one.compared[kind]:,}" for kind in one.compared)]
        for one in conditions
    ]


def sentences(result: ServingResult) -> list[str]:
    """Return the results that have no column."""
    found = next(iter(result.groups.values()), None)
    lines = [] if found is None else [_throughput(found), *_outcome(result, found)]
    if found is not None and found.good is not None:
        share = format_percent(found.good / found.total)
        rate = format_number(found.per_second(found.good))
        lines.append(f"goodput: {rate} requests/s, {share} of requests ({goodput_words(result.plan.limits)})")
    if result.capacity is not None:
        clients = counted(result.capacity.clients, "client")
        lines.append(f"capacity: {format_number(result.capacity.rate)} requests/s with {clients}")
    if result.retry_after is not None and (result.retry_after.rejections or result.plan.workload == OVERLOAD):
        lines += _retry_after(result.retry_after)
    if result.predicted_waits is not None:
        lines.append(_predicted(result.predicted_waits))
    if result.cancelling is not None:
        lines += _cancelling(result.cancelling)
    return [*lines, *_sameness(result.conditions)]


def _columns(spread: Spread) -> tuple[float, ...]:
    return spread.mean, spread.p50, spread.p90, spread.p99


def _throughput(found: Figures) -> str:
    requests, tokens = found.per_second(found.completed), found.per_second(found.output_tokens)
    words = f"throughput: {format_number(requests)} requests/s, {format_number(tokens)} output tok/s"
    if found.cached_tokens and found.prompt_tokens:
        words += f"; {format_percent(found.cached_tokens / found.prompt_tokens)} of prompt tokens were cached"
    return words


def _outcome(result: ServingResult, found: Figures) -> list[str]:
    if found.completed == found.total:
        return []
    parts = [f"{found.completed:,} ok", f"{found.rejected:,} rejected (429)"]
    for kind, number in sorted(found.failed.items()):
        said = result.messages.get(kind, "")
        parts.append(f"{number:,} {kind}" + (f" ({said})" if said else ""))
    return [f"requests: {', '.join(parts)}"]


def _retry_after(found: RetryAfter) -> list[str]:
    if not found.rejections:
        return ["no 429: the server queued all requests"]
    if found.promised is None:
        return [f"{counted(found.rejections, 'response')} with status 429, none with Retry-After"]
    median, least, most = (format_seconds(seconds) for seconds in found.promised)
    lines = [
        f"Retry-After: {found.with_time:,} of {found.rejections:,} 429s, {median} (median, {least} to {most}); "
        f"{found.accepted:,} of {counted(found.obeyed, 'request')} accepted at the first retry"
    ]
    errors = [
        f"{format_percent(error)} against {what}"
        for error, what in (
            (found.error, "the wait until the first text"),
            (found.newcomer_error, "the first text of a later request"),
        )
        if error is not None
    ]
    return [*lines, f"Retry-After, median error: {', '.join(errors)}"] if errors else lines


def _predicted(found: PredictedWaits) -> str:
    if found.error is None or found.within_2x is None:
        return f"x-llmrun-wait: no request waited for {SHORTEST_WAIT_S:g} s"
    return (
        f"x-llmrun-wait: median error {format_percent(found.error)}, {format_percent(found.within_2x)} within a factor "
        f"of 2 ({counted(found.compared, 'request')} that waited for at least {SHORTEST_WAIT_S:g} s)"
    )


def _cancelling(found: Cancelling) -> list[str]:
    lines = []
    for phase in found.phases:
        mode = "streaming" if phase.streams else "not streaming"
        ended = f", {phase.ended:,} ended first" if phase.ended else ""
        lines.append(f"left in {phase.name}, {mode}: {phase.left:,}{ended}")
    if found.unfinished is None:
        lines.append("the server does not report its running requests (/metrics, /slots or /health)")
    elif found.unfinished:
        still = counted(found.unfinished, "request")
        lines.append(f"still on the server after {GRACE_S:g} s: {still} whose clients disconnected ({found.source})")
    else:
        lines.append(f"server idle after {format_seconds(found.idle_after)} ({found.source})")
    after = "no answer" if found.ttft_after is None else format_seconds(found.ttft_after)
    return [*lines, f"TTFT of a single request: {format_seconds(found.ttft_before)} before, {after} afterwards"]


def _sameness(conditions: Sequence[Condition]) -> list[str]:
    if not conditions:
        return []
    compared = sum(sum(one.compared.values()) for one in conditions)
    different = sum(sum(one.different.values()) for one in conditions)
    failed = sum(one.failed for one in conditions)
    words = f"{different:,} of {counted(compared, 'answer')} differ from the answers of requests that ran alone"
    return [f"{words}; {counted(failed, 'request')} failed" if failed else words]
