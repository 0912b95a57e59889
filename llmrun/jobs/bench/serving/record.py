"""The times and counts of each request, parsed after the run, and the percentiles and goodput of all requests.

The definitions match `vllm bench serve`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.stream import Teller, Usage, read_chunks, server_words
from llmrun.jobs.bench.serving.driving import Exchange
from llmrun.jobs.bench.serving.plan import METRICS, meets

_REJECTED = "HTTP 429"


@dataclass(frozen=True, slots=True)
class Record:
    """The times and the outcome of one request. Times are in seconds since the run began.

    due      the time when the request should have been sent; TTFT and E2E are measured from this time
    sent     the time when the request was sent
    moments  the arrival times of the pieces of text; empty if the request did not succeed
    problem  the kind of failure, such as "HTTP 500" or "connection lost"; empty if the request succeeded
    words    the server's message about the failure
    usage    the server's token counts, or None
    """

    due: float
    sent: float
    moments: tuple[float, ...]
    ended: float
    problem: str
    words: str
    usage: Usage | None

    @property
    def output_tokens(self) -> int:
        """The server's count of the answer's tokens, or the number of pieces if the server reports no count."""
        return (self.usage.completion_tokens if self.usage else 0) or len(self.moments)

    @property
    def gaps(self) -> list[float]:
        """The inter-token latencies, which are the times between consecutive pieces of text."""
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:], strict=False)]


def parsed(exchange: Exchange, started: float, teller: Teller) -> Record:
    """Parse a request's response. `started` is the start of the run, from time.perf_counter."""
    moments: list[float] = []
    usage, words, problem = None, "", exchange.problem
    if not problem:
        problem, words = _refusal(exchange, teller)
    if not problem:
        if exchange.headers.get("content-type", "").lower().startswith("text/event-stream"):
            moments, usage, problem, words = _read(exchange.pieces, exchange.ended, teller)
        else:
            problem = "answer is not an event stream"
    return Record(
        due=exchange.due - started,
        sent=exchange.sent - started,
        moments=tuple(moment - started for moment in moments),
        ended=exchange.ended - started,
        problem=problem,
        words=words,
        usage=usage,
    )


def _refusal(exchange: Exchange, teller: Teller) -> tuple[str, str]:
    """Return the problem and the server's message if the status is not a success."""
    if 200 <= exchange.status < 300:
        return "", ""
    try:
        words = server_words(json.loads(exchange.body))
    except (ValueError, RecursionError):
        words = ""
    return f"HTTP {exchange.status}", teller.shown(words)


def _read(
    pieces: Sequence[tuple[float, bytes]], ended: float, teller: Teller
) -> tuple[list[float], Usage | None, str, str]:
    """Return the arrival times, the token usage, the problem and the problem's message."""
    moments: list[float] = []
    usage: Usage | None = None
    try:
        for chunk in read_chunks(pieces, teller):
            usage = chunk.usage or usage
            if chunk.text or chunk.reasoning:
                moments.append(chunk.arrived)
    except NetworkError as error:
        problem, _, words = str(error).partition(": ")
        return [], usage, problem, words
    # Without any text, the end token counts as the only token.
    return moments or [ended], usage, "", ""


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of times in seconds. Percentiles are interpolated linearly, as in vLLM."""

    count: int
    mean: float
    stddev: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The times and outcomes of all requests of a run.

    times          metric (see plan.METRICS) -> its distribution; metrics without values are left out. The values of ITL
                   are all gaps of all requests
    seconds        the time from the start of the run to the end of its last request
    rejected       the number of requests with the response 429
    failed         kind of failure -> number of requests, without rejected requests
    good           the number of requests that meet the limits of --goodput, or None without limits
    cached_tokens  prompt tokens that the server read from its cache
    """

    times: Mapping[str, Spread]
    seconds: float
    completed: int
    rejected: int
    failed: Mapping[str, int]
    good: int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.completed + self.rejected + sum(self.failed.values())

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


def request_times(record: Record) -> dict[str, float]:
    """Return the times of a successful request in seconds, keyed by metric.

    TTFT and E2E are measured from the time when the request was due, so these metrics include every delay of the
    client. E2E ends with the last piece of text. TPOT is the mean time per token after the first. ITL is the 99th
    percentile of the gaps between two pieces of text.
    """
    first, last = record.moments[0], record.moments[-1]
    values = {"ttft": first - record.due, "e2e": last - record.due}
    if record.output_tokens > 1:
        values["tpot"] = (last - first) / (record.output_tokens - 1)
    if gaps := record.gaps:
        values["itl"] = float(np.percentile(gaps, 99))
    return values


def figures(records: Sequence[Record], limits: Mapping[str, float]) -> Figures:
    """Summarize the requests of a run. `limits` maps metrics to limits in seconds, for goodput."""
    done = [record for record in records if not record.problem]
    per_request = [request_times(record) for record in done]
    values = {name: [times[name] for times in per_request if name in times] for name in METRICS}
    values["itl"] = [gap for record in done for gap in record.gaps]
    usages = [record.usage for record in done if record.usage is not None]
    failed = Counter(record.problem for record in records if record.problem)
    return Figures(
        times={name: spread(found) for name, found in values.items() if found},
        seconds=max((record.ended for record in records), default=0.0),
        completed=len(done),
        rejected=failed.pop(_REJECTED, 0),
        failed=dict(failed),
        good=sum(meets(times, limits) for times in per_request) if limits else None,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=sum(record.output_tokens for record in done),
    )


def spread(values: Iterable[float]) -> Spread:
    """Summarize values in seconds. Raises ValueError if `values` is empty."""
    numbers = np.asarray([*values], np.float64)
    if not numbers.size:
        raise ValueError("spread: no values")
    p50, p90, p99 = np.percentile(numbers, PERCENTILES).tolist()
    return Spread(numbers.size, float(numbers.mean()), float(numbers.std()), p50, p90, p99)
