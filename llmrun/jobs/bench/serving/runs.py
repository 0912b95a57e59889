"""Runs the serving benchmark on one server, and formats its results as JSON and as text.

The JSON uses the names of `vllm bench serve` where it has them. The text is for both the terminal and Markdown.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from llmrun.base.amounts import counted, format_number, format_percent, format_seconds_briefly
from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import KEY_VARIABLE, RemoteModel
from llmrun.engine.remote.request import parse_endpoint
from llmrun.engine.remote.stream import Teller
from llmrun.jobs.bench.measuring.pool import BenchReporter
from llmrun.jobs.bench.serving.driving import Sender, arrival_times
from llmrun.jobs.bench.serving.plan import METRICS, MIXED, ServingPlan, goodput_words
from llmrun.jobs.bench.serving.record import Figures, Record, Spread, duration_of, figures, spread
from llmrun.jobs.bench.serving.session import Capacity, Probe, Session, probed, refuse_failures
from llmrun.jobs.bench.serving.workloads import RequestMaker, groups_of

_LATE_S = 0.01  # Requests that are sent later than this disturb the measurement.


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The results of a run.

    rate       the rate of the open loop in requests per second; None for a closed loop
    capacity   the measured capacity; None if it was not needed
    groups     the name of a group of requests -> its figures; the first one has all requests
    lateness   how late the client sent requests of an open loop; None for a closed loop
    messages   kind of failure -> an example of the server's message
    """

    model: str
    host: str
    plan: ServingPlan
    probe: Probe
    rate: float | None
    capacity: Capacity | None
    groups: Mapping[str, Figures]
    lateness: Spread | None
    messages: Mapping[str, str]
    interrupted: bool

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
    return asyncio.run(_run(session))


async def _run(session: Session) -> ServingResult:
    """Send the requests of a workload in an open or a closed loop."""
    await session.sender.connect()
    plan, maker = session.plan, session.maker
    if plan.rate is None:
        numbers = count() if plan.requests is None else range(plan.requests)
        planned = map(maker.request, numbers)
        records = await session.closed_loop(planned, plan.concurrency, duration=plan.sending_s)
        return _result(session, records)
    capacity = await session.capacity() if plan.rate.is_multiple else None
    rate = plan.rate.value * (capacity.rate if capacity else 1.0)
    times = arrival_times(
        rate, plan.seed, requests=plan.requests, duration=plan.sending_s, burstiness=plan.burstiness
    ) or [0.0]
    records = await session.open_loop(map(maker.request, range(len(times))), times)
    late = spread(record.sent - record.due for record in records) if records else None
    return _result(session, records, rate=rate, capacity=capacity, lateness=late)


def _result(
    session: Session,
    records: Sequence[Record],
    *,
    rate: float | None = None,
    capacity: Capacity | None = None,
    lateness: Spread | None = None,
) -> ServingResult:
    if not records:
        raise KeyboardInterrupt
    if not any(record.succeeded for record in records):
        refuse_failures(records, session.maker.model, session.teller)
        raise NetworkError(f"nothing to measure: {session.teller.host}: no request succeeded")
    seconds = duration_of(records)
    return ServingResult(
        model=session.maker.model,
        host=session.teller.host,
        plan=session.plan,
        probe=session.probe,
        rate=rate,
        capacity=capacity,
        groups={
            group.name: figures(group.records, session.plan.limits, seconds, group.gaps)
            for group in groups_of(session.plan.workload, records)
        },
        lateness=lateness,
        messages={record.problem: record.words for record in records if record.problem and record.words},
        interrupted=session.interrupted,
    )


_VLLM_NAMES = {"e2e": "e2el"}


def to_row(result: ServingResult) -> dict[str, Any]:
    """Return a run as a JSON object. Times whose names end in `_ms` are in milliseconds, all others in seconds."""
    plan, late = result.plan, result.lateness
    first = next(iter(result.groups.values()))
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
        **_figures(first),
        "groups": {name: _figures(found) for name, found in result.groups.items()},
        "messages": dict(result.messages),
        "idle_ttft_ms": result.probe.ttft * 1e3,
        "idle_tpot_ms": result.probe.tpot * 1e3,
        "late_ms": None if late is None else {"p50": late.p50 * 1e3, "p99": late.p99 * 1e3},
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


def heading(result: ServingResult) -> str:
    """Return a line that says what ran."""
    plan = result.plan
    words = [f"{result.model} @ {result.host}", plan.workload, f"{plan.prompt} in, {plan.generate} out"]
    if plan.prefix:
        long = f"long prompts {plan.prompt + plan.prefix}"
        words.append(long if plan.workload == MIXED else f"prefix {plan.prefix}")
    if result.rate is not None:
        words.append(f"open loop at {format_number(result.rate)} requests/s")
    else:
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


def sentences(result: ServingResult) -> list[str]:
    """Return the results that have no column."""
    found = next(iter(result.groups.values()))
    lines = [_throughput(found), *_outcome(result, found)]
    if found.good is not None:
        share = format_percent(found.good / found.total)
        rate = format_number(found.per_second(found.good))
        lines.append(f"goodput: {rate} requests/s, {share} of requests ({goodput_words(result.plan.limits)})")
    if result.capacity is not None:
        clients = counted(result.capacity.clients, "client")
        lines.append(f"capacity: {format_number(result.capacity.rate)} requests/s with {clients}")
    return lines


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
