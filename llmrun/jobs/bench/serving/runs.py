"""Runs the serving benchmark on one server, and formats its results as JSON and as text.

The JSON uses the names of `vllm bench serve` where such names exist. The text is for both the terminal and Markdown.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from llmrun.base.amounts import counted, format_number, format_percent, format_seconds_briefly
from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import KEY_VARIABLE, Call, RemoteModel
from llmrun.engine.remote.request import RemoteRequest, parse_endpoint, remote_request
from llmrun.engine.remote.stream import Teller
from llmrun.engine.requests import Request, TextPrompt
from llmrun.jobs.bench.measuring.asking import random_words
from llmrun.jobs.bench.measuring.pool import BenchReporter
from llmrun.jobs.bench.serving.driving import Driver, Sender, arrival_times
from llmrun.jobs.bench.serving.plan import METRICS, ServingPlan, goodput_words
from llmrun.jobs.bench.serving.record import Figures, Record, Spread, figures, parsed, spread
from llmrun.options.sampling_params import SamplingParams

_LATE_S = 0.01  # Delaying requests by more than this limit disturbs the measurement.
_SENT = frozenset({"temperature", "seed"})  # All other sampling parameters are left at the server's defaults.
_WARM_UP = 1 << 32  # The number of the warm-up prompt, which no run uses.
_WARM_UP_TOKENS = 16
_MOST_EVENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The results of a run.

    left_out       the fields beyond OpenAI's API that the server rejected
    counts_tokens  True if the server reports token counts in streams
    lateness       how late the client sent the requests of an open loop; None for a closed loop
    messages       kind of failure -> an example of the server's message
    """

    model: str
    host: str
    plan: ServingPlan
    left_out: Sequence[str]
    counts_tokens: bool
    figures: Figures
    lateness: Spread | None
    messages: Mapping[str, str]
    interrupted: bool

    @property
    def notes(self) -> list[str]:
        """Remarks about the server and the client that affect the interpretation of the figures."""
        found = []
        if self.left_out:
            found.append(f"{self.host} does not support {', '.join(self.left_out)}: answers may be shorter")
        if not self.counts_tokens:
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
        reporter.progress(f"{model.endpoint.host}: warming up")
        warm_up(model, plan)
    finally:
        model.close()
    key = os.environ.get(KEY_VARIABLE) or None
    teller = Teller(model.endpoint.host, key)
    path = request_of(plan, model.endpoint.model, 0).path
    driver = Driver(Sender(model.endpoint, key), path)
    contents = _contents(plan, model)
    records, interrupted = asyncio.run(_run(plan, driver, contents, teller, reporter))
    if not records:
        raise KeyboardInterrupt
    _refuse_if_all_failed(records, model)
    return ServingResult(
        model=model.endpoint.model,
        host=model.endpoint.host,
        plan=plan,
        left_out=model.left_out,
        counts_tokens=any(record.usage is not None for record in records),
        figures=figures(records, plan.limits),
        lateness=None if plan.rate is None else spread(record.sent - record.due for record in records),
        messages={record.problem: record.words for record in records if record.problem and record.words},
        interrupted=interrupted,
    )


def warm_up(model: RemoteModel, plan: ServingPlan) -> None:
    """Send one request of the plan, and record in `model.left_out` which fields the server rejects.

    Raises NetworkError, ModelNotFound and ContextExceeded.
    """
    wire = request_of(plan, model.endpoint.model, _WARM_UP, min(_WARM_UP_TOKENS, plan.generate))
    for _ in model.stream(wire.path, wire.body, wire.extras, Call(), most_events=_MOST_EVENTS):
        pass


def request_of(plan: ServingPlan, model: str, number: int, tokens: int | None = None) -> RemoteRequest:
    """Return the request with the given number, whose prompt depends only on the number and the plan's seed.

    tokens  the length of the answer; None for the length in the plan
    """
    prompt = TextPrompt(random_words(np.random.default_rng([plan.seed, number]), plan.prompt))
    request = Request(prompt, tokens or plan.generate, sampling=SamplingParams(temperature=0), sent_sampling=_SENT)
    return remote_request(request, model, ignore_eos=True)


def _contents(plan: ServingPlan, model: RemoteModel) -> Iterator[bytes]:
    """Yield the JSON of the plan's requests, without the fields that the server rejects."""
    for number in count() if plan.requests is None else range(plan.requests):
        wire = request_of(plan, model.endpoint.model, number)
        extras = {name: value for name, value in wire.extras.items() if name not in model.left_out}
        yield json.dumps(wire.body | extras).encode()


async def _run(
    plan: ServingPlan, driver: Driver, contents: Iterator[bytes], teller: Teller, reporter: BenchReporter
) -> tuple[list[Record], bool]:
    """Send the requests in an open or a closed loop. Return completed requests, and whether Ctrl-C ended the loop."""
    await driver.sender.connect()
    total = plan.requests
    if plan.rate is None:
        loop = driver.closed_loop(contents, plan.concurrency, duration=plan.sending_s or math.inf)
    else:
        times = arrival_times(
            plan.rate, plan.seed, requests=plan.requests, duration=plan.sending_s, burstiness=plan.burstiness
        ) or [0.0]
        total = len(times)
        loop = driver.open_loop(contents, times)
    started = time.perf_counter()

    def told() -> tuple[str, float | None]:
        done = f"{len(driver.ended):,}" if total is None else f"{len(driver.ended):,} of {total:,}"
        return f"{done} requests done, {driver.running:,} running", len(driver.ended) / total if total else None

    reporter.watch(told)
    interrupted = False
    try:
        await loop
    except asyncio.CancelledError:
        interrupted = True
    return [parsed(exchange, started, teller) for exchange in driver.ended], interrupted


def _refuse_if_all_failed(records: Sequence[Record], model: RemoteModel) -> None:
    """Raise NetworkError if no request succeeded."""
    if all(record.problem for record in records):
        first = records[0]
        seen = f"{first.problem}: {first.words}" if first.words else first.problem
        where = f"{model.endpoint.model} @ {model.endpoint.host}"
        raise NetworkError(f"{len(records):,} of {len(records):,} requests failed: {where}: {seen}")


_VLLM_NAMES = {"e2e": "e2el"}


def to_row(result: ServingResult) -> dict[str, Any]:
    """Return a run as a JSON object. Times with names that end in `_ms` are in milliseconds, all others in seconds."""
    plan, late = result.plan, result.lateness
    return {
        "backend": "openai",
        "model_id": result.model,
        "host": result.host,
        "seed": plan.seed,
        "n_prompt": plan.prompt,
        "n_gen": plan.generate,
        "request_rate": plan.rate,
        "burstiness": plan.burstiness,
        "concurrency": plan.concurrency if plan.rate is None else None,
        "goodput_slo_ms": {name: limit * 1e3 for name, limit in plan.limits.items()},
        **_figures(result.figures),
        "messages": dict(result.messages),
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


TIMES_HEAD = ("time", "count", "mean", "p50", "p90", "p99")


def heading(result: ServingResult) -> str:
    """Return a line that describes the run."""
    plan = result.plan
    words = [f"{result.model} @ {result.host}", f"{plan.prompt} in, {plan.generate} out"]
    if plan.rate is not None:
        words.append(f"open loop at {format_number(plan.rate)} requests/s")
    else:
        words.append(counted(plan.concurrency, "client"))
    return "  ".join([*words, f"seed {plan.seed}"])


def times_rows(result: ServingResult) -> list[list[str]]:
    """Return a row with the columns of TIMES_HEAD for each metric."""
    return [
        [
            metric.upper(),
            f"{times.count:,}",
            *map(format_seconds_briefly, (times.mean, times.p50, times.p90, times.p99)),
        ]
        for metric in METRICS
        if (times := result.figures.times.get(metric)) is not None
    ]


def sentences(result: ServingResult) -> list[str]:
    """Return sentences with the results that are not in the table."""
    found = result.figures
    lines = [_throughput(found), *_outcome(result, found)]
    if found.good is not None:
        share = format_percent(found.good / found.total)
        rate = format_number(found.per_second(found.good))
        lines.append(f"goodput: {rate} requests/s, {share} of requests ({goodput_words(result.plan.limits)})")
    return lines


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
