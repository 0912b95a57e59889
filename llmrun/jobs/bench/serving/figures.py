"""Percentiles, throughput and goodput of a run's requests, with the definitions of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmrun.jobs.bench.serving.goodput import METRICS, meets
from llmrun.jobs.bench.serving.record import Record

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
    """The times and outcomes of a group of requests.

    times          metric (see goodput.METRICS) -> its distribution; metrics without values are left out. The values of
                   ITL are all gaps of all requests
    seconds        from the start of the run to the end of its last request
    rejected       requests whose last attempt got a 429
    failed         kind of failure -> number of requests, without the rejected ones
    left           requests that the client left as planned
    good           the requests that meet the limits of --goodput, or None without limits
    cached_tokens  prompt tokens that the server took from its cache
    """

    times: Mapping[str, Spread]
    seconds: float
    completed: int
    rejected: int
    failed: Mapping[str, int]
    left: int
    good: int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.completed + self.rejected + sum(self.failed.values()) + self.left

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


def request_times(record: Record) -> dict[str, float]:
    """Return the times of a successful request in seconds: metric -> value.

    TTFT and E2E count from the time when the request was due, so they include every delay of the client and all earlier
    attempts. E2E ends with the last piece of text. TPOT is the mean time per token after the first. ITL is the 99th
    percentile of the gaps between two pieces of text.
    """
    first, last = record.moments[0], record.moments[-1]
    values = {"ttft": first - record.due, "e2e": last - record.due}
    if record.output_tokens > 1:
        values["tpot"] = (last - first) / (record.output_tokens - 1)
    if gaps := record.gaps:
        values["itl"] = float(np.percentile(gaps, 99))
    return values


def figures(
    records: Sequence[Record], limits: Mapping[str, float], seconds: float, gaps: Sequence[float] | None = None
) -> Figures:
    """Summarize a group of requests.

    limits   metric -> limit in seconds, for goodput
    seconds  the duration of the run
    gaps     the ITLs to summarize; None for those of the group's requests
    """
    done = [record for record in records if record.succeeded]
    per_request = [request_times(record) for record in done]
    values = {name: [times[name] for times in per_request if name in times] for name in METRICS}
    values["itl"] = [gap for record in done for gap in record.gaps] if gaps is None else [*gaps]
    usages = [record.usage for record in done if record.usage is not None]
    unanswered = [record for record in records if record.problem]
    return Figures(
        times={name: spread(found) for name, found in values.items() if found},
        seconds=seconds,
        completed=len(done),
        rejected=sum(record.is_rejected for record in unanswered),
        failed=dict(Counter(record.problem for record in unanswered if not record.is_rejected)),
        left=sum(record.left for record in records),
        good=sum(meets(times, limits) for times in per_request) if limits else None,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=sum(record.output_tokens for record in done),
    )


def spread(values: Iterable[float]) -> Spread:
    """Summarize values in seconds. Raises ValueError if there are none."""
    numbers = np.asarray([*values], np.float64)
    if not numbers.size:
        raise ValueError("spread: no values")
    p50, p90, p99 = np.percentile(numbers, PERCENTILES).tolist()
    return Spread(numbers.size, float(numbers.mean()), float(numbers.std()), p50, p90, p99)


def duration_of(records: Sequence[Record]) -> float:
    """Return the time from the start of the run to the end of its last request."""
    return max((record.ended for record in records), default=0.0)
