"""Formats the prediction of `llmrun batch --dry-run`, as a report and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from llmrun.base.amounts import counted, format_number, format_percent, format_seconds
from llmrun.cli.console.columns import hanging
from llmrun.cli.console.terminal import room
from llmrun.jobs.batching.estimate.estimating import Estimate
from llmrun.jobs.batching.estimate.prediction import ApiPrice
from llmrun.jobs.bench.analysis.intervals import Interval

_JOULES_PER_KWH: Final = 3.6e6
_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _HOUR_S  # longer times are shown in hours
_LEAST_LABEL: Final = 9  # columns


@dataclass(frozen=True, slots=True)
class Comparison:
    """More predictions: the price of an API, or None, and the time on several machines, or None."""

    price: ApiPrice | None = None
    machines: int | None = None


def lines_of(estimate: Estimate, comparison: Comparison) -> list[str]:
    """Return the lines of the report."""
    fields = [*_counted(estimate), *_measured(estimate), *_predicted(estimate, comparison)]
    label = max(_LEAST_LABEL, *(len(name) for name, _ in fields))
    lines = (f"{name:<{label}}  {words}".rstrip() for name, words in fields)
    return [row for line in lines for row in hanging(line, room(sys.stdout))]


def _counted(estimate: Estimate) -> Iterator[tuple[str, str]]:
    counts = estimate.counts
    words = [counted(counts.lines, "line")]
    if counts.failing:
        words.append(f"{counts.failing:,} cannot be answered")
    if counts.answered > counts.calls:
        words.append(f"{counts.answered - counts.calls:,} equal to others")
    yield "input", ", ".join([*words, f"{counts.calls:,} to answer" if len(words) > 1 else ""]).removesuffix(", ")
    prefixes = counts.prefixes
    reused = f", {format_percent(1 - prefixes.computed / prefixes.total)} in shared prefixes"
    yield "prompts", f"{counts.prompt_tokens:,} tokens{reused if prefixes.computed < prefixes.total else ''}"


def _measured(estimate: Estimate) -> Iterator[tuple[str, str]]:
    sample, speeds = estimate.sample, estimate.speeds
    n, calls = len(sample.lengths), counted(estimate.counts.calls, "request")
    answered = calls if n == estimate.counts.calls else f"{n:,} of {calls}"
    words = [f"{answered} answered in {format_seconds(sample.seconds)}"]
    words.append(f"{sample.most_at_a_time} at a time")
    if sample.cut:
        words.append(f"{len(sample.cut):,} of them only in part")
    yield "sample", ", ".join(words)
    rates = [(speeds.prompt_s, "prompt tok/s"), (speeds.generated_s, "generated tok/s")]
    shown = [f"{format_number(1 / seconds)} {unit}" for seconds, unit in rates if seconds > 0]
    if shown:
        yield "speed", ", ".join(shown)
    yield "answers", _ranged(estimate.per_call, format_number, " tokens on average")


def _predicted(estimate: Estimate, comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "", ""
    yield "generated", _ranged(estimate.generated, _whole, " tokens")
    seconds = estimate.seconds()
    yield "time", _ranged(seconds, _time)
    yield "energy", _energy(estimate, seconds, 1)
    if comparison.machines is not None:
        seconds = estimate.seconds(comparison.machines)
        named = counted(comparison.machines, "machine")
        yield named, _ranged(seconds, _time)
        if estimate.watts is not None:
            yield "", _energy(estimate, seconds, comparison.machines)
    if comparison.price is not None:
        price = comparison.price
        prompts = price.of_prompts(estimate.counts.billed_tokens)
        whole = price.of(estimate.counts.billed_tokens, estimate.generated_for_lines)
        yield "API price", f"{_ranged(whole, format_number)}, of which {format_number(prompts)} for prompts"


def _energy(estimate: Estimate, seconds: Interval, machines: int) -> str:
    watts = estimate.watts
    if watts is None:
        return "unknown (no RAPL or NVML counter can be read)"
    kwh = seconds.times(watts * machines / _JOULES_PER_KWH)
    return f"{_ranged(kwh, format_number, ' kWh')}, {format_number(watts)} W by {estimate.sample.source}"


def _ranged(interval: Interval, show: Callable[[float], str], unit: str = "") -> str:
    """Return `142 tokens (118 to 166)`, without the range if both ends look the same."""
    estimate, low, high = map(show, interval)
    return f"{estimate}{unit}" if low == high else f"{estimate}{unit} ({low} to {high})"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds < _LONG_S else f"{format_number(seconds / _HOUR_S)} hours"


def body_of(estimate: Estimate, comparison: Comparison) -> dict[str, Any]:
    """Return the prediction as JSON. Intervals have 95 % confidence."""
    counts, sample, speeds = estimate.counts, estimate.sample, estimate.speeds
    machines, price = comparison.machines, comparison.price
    return {
        "lines": counts.lines,
        "failing": counts.failing,
        "calls": counts.calls,
        "prompt_tokens": counts.prompt_tokens,
        "computed_prompt_tokens": counts.prefixes.computed,
        "prompt_tokens_of_all_lines": counts.billed_tokens,
        "sample": {
            "finished": len(sample.finished),
            "unfinished": len(sample.cut),
            "generated_tokens": sum(sample.lengths),
            "seconds": round(sample.seconds, 3),
            "at_a_time": sample.most_at_a_time,
            "prompt_tokens_per_second": 1 / speeds.prompt_s if speeds.prompt_s else None,
            "generated_tokens_per_second": 1 / speeds.generated_s if speeds.generated_s else None,
        },
        "load_seconds": round(estimate.load_s, 3),
        "generated_tokens_per_call": estimate.per_call._asdict(),
        "generated_tokens": estimate.generated._asdict(),
        "seconds": estimate.seconds()._asdict(),
        "energy": _energy_body(estimate, 1),
        "machines": None
        if machines is None
        else {
            "count": machines,
            "seconds": estimate.seconds(machines)._asdict(),
            "energy": _energy_body(estimate, machines),
        },
        "api_price": None
        if price is None
        else {
            "prompts": price.of_prompts(counts.billed_tokens),
            "total": price.of(counts.billed_tokens, estimate.generated_for_lines)._asdict(),
        },
    }


def _energy_body(estimate: Estimate, machines: int) -> dict[str, Any] | None:
    watts = estimate.watts
    if watts is None:
        return None
    joules = estimate.seconds(machines).times(watts * machines)
    return {"source": estimate.sample.source, "watts_per_machine": watts, "joules": joules._asdict()}
