"""Runs `llmrun batch --dry-run`, which predicts what a batch will take and writes only a report.

The report can be text or JSON.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.amounts import counted, format_clock, format_number, format_percent, format_seconds
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.machine.energy import EnergyMeter, nvml_sources, rapl_sources
from llmrun.cli.batching.workers import LOCAL, WorkersWanted
from llmrun.cli.console.output import hanging, out
from llmrun.cli.console.progress import show_loading
from llmrun.cli.console.terminal import hide_control_echo, room
from llmrun.jobs.batching.estimate.counting import CallReader, Counts, count_batch
from llmrun.jobs.batching.estimate.estimating import ApiPrice, Estimate, estimate_of
from llmrun.jobs.batching.estimate.sampling import BEGIN_S, Sampler
from llmrun.jobs.batching.requests import check_source
from llmrun.jobs.bench.intervals import Interval

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Loading, Note
    from llmrun.jobs.batching.requests import CallOptions
    from llmrun.options.settings import Settings

_JOULES_PER_KWH: Final = 3.6e6
_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _HOUR_S  # longer times are shown in hours
_LEAST_LABEL: Final = 9  # columns


@dataclass(frozen=True, slots=True)
class Comparison:
    """More predictions: the price of an API, or None, and the time on several machines, or None."""

    price: ApiPrice | None = None
    machines: int | None = None


def report_lines(estimate: Estimate, comparison: Comparison) -> list[str]:
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


def report_json(estimate: Estimate, comparison: Comparison) -> dict[str, Any]:
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


def parse_prices(text: str | None) -> ApiPrice | None:
    """Parse the value of --compare-price. Raises UsageError."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(math.isfinite(number) and number >= 0 for number in numbers):
        hint = "give the prices of a million prompt tokens and of a million generated ones, such as 0.15,0.60"
        raise UsageError(f"--compare-price: {text!r:.80} is not a pair of prices", hint=hint)
    return ApiPrice(*numbers)


def dry_run(
    source: Path,
    calls: CallOptions,
    wanted: WorkersWanted,
    settings: Settings,
    *,
    comparison: Comparison,
    as_json: bool,
) -> int:
    """Predict what a batch takes, print it, and return the exit code 0.

    Raises UsageError for an input without lines and for workers on other machines, LlmrunError if no line can be
    answered, and the errors of opening a model.
    """
    if list(wanted.names) != [LOCAL]:
        hint = "name a model with -m, and leave out --workers; --machines N predicts for several machines like this one"
        raise UsageError("--dry-run: works only for a model on this machine", hint=hint)
    check_source(source, has_template=calls.fill is not None)
    show_control_echo = hide_control_echo()
    try:
        estimate = _estimated(source, calls, wanted, settings)
    finally:
        show_control_echo()
        out.clear_progress()
    _warn(estimate)
    if as_json:
        out.json(report_json(estimate, comparison))
    else:
        out.lines(report_lines(estimate, comparison))
    return 0


def _warn(estimate: Estimate) -> None:
    counts, at_a_time = estimate.counts, estimate.sample.most_at_a_time
    if counts.first_problem is not None:
        number, words = counts.first_problem
        out.note(f"{counted(counts.failing, 'line')} cannot be answered; the first is line {number:,}: {words}")
    if at_a_time < min(estimate.parallel, counts.calls) and not estimate.is_complete:
        run = f"the sample ran only {counted(at_a_time, 'answer')} at a time"
        out.note(f"{run}; the real run uses more, and may be faster")


def _estimated(source: Path, calls: CallOptions, wanted: WorkersWanted, settings: Settings) -> Estimate:
    with _opened(wanted, settings) as reader:
        engine = reader.engine
        counts = count_batch(source, calls, reader.count, lambda counts: out.progress(_counting(counts)))
        _check(source, counts)
        meter = EnergyMeter([*rapl_sources(), *(nvml_sources() if engine.info.gpu_layers else ())])
        sample = Sampler(reader, counts.sample, wanted.parallel).run(
            meter, lambda done, seconds: out.progress(_measuring(done, seconds))
        )
        return estimate_of(counts, sample, wanted.parallel, engine.load_s)


def _counting(counts: Counts) -> str:
    return f"counting tokens: {counted(counts.calls, 'request')}, {counts.prompt_tokens:,} tokens"


def _measuring(done: int, seconds: float) -> str:
    left = BEGIN_S - seconds
    return f"measuring: {counted(done, 'answer')}, {format_clock(left) + ' left' if left > 0 else 'finishing'}"


def _check(source: Path, counts: Counts) -> None:
    """Raise an error if there is nothing to answer."""
    if not counts.lines:
        raise UsageError(f"{source}: the file has no lines")
    if counts.first_problem is not None and not counts.calls:
        number, words = counts.first_problem
        raise LlmrunError(f"{source}: no line can be answered; line {number:,}: {words}")


@contextmanager
def _opened(wanted: WorkersWanted, settings: Settings) -> Iterator[CallReader]:
    """Open the model in this process, as the worker of a run opens it in another one."""
    from llmrun.base.errors import kernel_warnings_told
    from llmrun.cli.answers.open_model import model_files, smaller_ones_named, tell_of_too_many_threads, to_open
    from llmrun.engine.child.opening import describe, open_engine

    tell_of_too_many_threads(settings)
    with model_files(settings) as files:
        opening = to_open(
            settings, files, parallel=wanted.parallel, kv_tokens=wanted.kv_tokens, template=wanted.template
        )
        with kernel_warnings_told(out.note), smaller_ones_named(files.found.entry):
            engine = open_engine(opening, _tell, lambda ids: None)
        with engine:
            yield CallReader(engine, describe(engine, opening))


def _tell(message: Loading | Note) -> None:
    from llmrun.engine.child.messages import Loading

    if isinstance(message, Loading):
        show_loading(message.work, message.fraction)
    else:
        out.detail(message.text)
