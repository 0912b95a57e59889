"""Runs `llmrun batch --dry-run`, which counts prompt tokens, measures the speed and writes only a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.amounts import counted, format_clock, format_number, format_percent, format_seconds
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.batching.running import check_lines
from llmrun.cli.batching.workers import LOCAL, WorkersWanted
from llmrun.cli.console.output import hanging, out
from llmrun.cli.console.terminal import hide_control_echo, room
from llmrun.jobs.batching.estimate import BEGIN_S, CallReader, Counts, Estimate, Sampler, count_batch
from llmrun.jobs.batching.requests import check_source

if TYPE_CHECKING:
    from llmrun.cli.answers.loading import ModelLoading
    from llmrun.engine.child.messages import Loading, Note
    from llmrun.jobs.batching.requests import CallOptions
    from llmrun.options.settings import Settings

_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _HOUR_S  # longer durations are shown in hours


def report_lines(estimate: Estimate) -> list[str]:
    """Return the lines of the report."""
    lines = (f"{name:<9}  {words}" for name, words in [*_counted(estimate.counts), *_measured(estimate)])
    return [row for line in lines for row in hanging(line, room(sys.stdout))]


def _counted(counts: Counts) -> Iterator[tuple[str, str]]:
    words = [counted(counts.lines, "line")]
    if counts.failing:
        words.append(f"{counts.failing:,} cannot be answered")
    if counts.answered > counts.calls:
        words.append(f"{counts.answered - counts.calls:,} equal to other lines")
    yield "input", ", ".join([*words, *([f"{counts.calls:,} to answer"] if len(words) > 1 else [])])
    prefixes = counts.prefixes
    reused = f", {format_percent(1 - prefixes.computed / prefixes.total)} in shared prefixes"
    yield "prompts", f"{counts.prompt_tokens:,} tokens{reused if prefixes.computed < prefixes.total else ''}"


def _measured(estimate: Estimate) -> Iterator[tuple[str, str]]:
    sample, n = estimate.sample, estimate.sample.finished + estimate.sample.unfinished
    calls = counted(estimate.counts.calls, "request")
    answered = calls if estimate.is_complete else f"{n:,} of {calls}"
    words = [f"{answered} answered in {format_seconds(sample.seconds)}", f"{sample.at_a_time} at a time"]
    if sample.unfinished:
        words.append(f"{sample.unfinished:,} of them only in part")
    yield "sample", ", ".join(words)
    rates = [
        (sample.seconds_per_prompt_token, "prompt tok/s"),
        (sample.seconds_per_generated_token, "generated tok/s"),
    ]
    if shown := [f"{format_number(1 / seconds)} {unit}" for seconds, unit in rates if seconds > 0]:
        yield "speed", ", ".join(shown)
    yield "answers", f"{format_number(estimate.generated_per_call)} tokens on average"
    seconds = estimate.seconds
    about = format_seconds(seconds) if seconds < _LONG_S else f"{format_number(seconds / _HOUR_S)} hours"
    yield "time", about if estimate.is_complete else f"{about} if all answers are as long as the sample's"


def report_json(estimate: Estimate) -> dict[str, Any]:
    """Return the report as JSON."""
    counts, sample = estimate.counts, estimate.sample
    prompt_s, generated_s = sample.seconds_per_prompt_token, sample.seconds_per_generated_token
    return {
        "lines": counts.lines,
        "failing": counts.failing,
        "calls": counts.calls,
        "prompt_tokens": counts.prompt_tokens,
        "computed_prompt_tokens": counts.prefixes.computed,
        "prompt_tokens_of_all_lines": counts.billed_tokens,
        "sample": {
            "finished": sample.finished,
            "unfinished": sample.unfinished,
            "generated_tokens": sample.generated,
            "seconds": round(sample.seconds, 3),
            "at_a_time": sample.at_a_time,
            "prompt_tokens_per_second": 1 / prompt_s if prompt_s else None,
            "generated_tokens_per_second": 1 / generated_s if generated_s else None,
        },
        "load_seconds": round(estimate.load_s, 3),
        "generated_tokens_per_call": estimate.generated_per_call,
        "seconds": round(estimate.seconds, 3),
    }


def dry_run(source: Path, calls: CallOptions, wanted: WorkersWanted, settings: Settings, *, as_json: bool) -> int:
    """Count a batch's tokens, measure the speed, print the report, and return the exit code 0.

    Raises UsageError for an input without lines or with a bad line and for workers on other machines, LlmrunError if no
    line can be answered, and any error from opening the model.
    """
    if list(wanted.names) != [LOCAL]:
        hint = "name a model with -m, and leave out --workers"
        raise UsageError("--dry-run: works only for a model on this machine", hint=hint)
    check_source(source, has_template=calls.fill is not None)
    wanted = replace(wanted, images=check_lines(source, calls))
    show_control_echo = hide_control_echo()
    try:
        estimate = _estimated(source, calls, wanted, settings)
    finally:
        show_control_echo()
        out.clear_progress()
    _warn(estimate)
    if as_json:
        out.json(report_json(estimate))
    else:
        out.lines(report_lines(estimate))
    return 0


def _warn(estimate: Estimate) -> None:
    counts, sample = estimate.counts, estimate.sample
    if counts.first_problem is not None:
        number, words = counts.first_problem
        out.note(f"{counted(counts.failing, 'line')} cannot be answered; the first is line {number:,}: {words}")
    if sample.at_a_time < min(sample.parallel, counts.calls) and not estimate.is_complete:
        run = f"the sample ran only {counted(sample.at_a_time, 'answer')} at a time"
        out.note(f"{run}; the real run uses more, and may be faster")


def _estimated(source: Path, calls: CallOptions, wanted: WorkersWanted, settings: Settings) -> Estimate:
    with _opened(wanted, settings) as reader:
        counts = count_batch(source, calls, reader.count, lambda counts: out.progress(_counting(counts)))
        _check(source, counts)
        sampler = Sampler(reader, counts.sample, wanted.parallel)
        sample = sampler.run(lambda done, seconds: out.progress(_measuring(done, seconds)))
        return Estimate(counts, sample, reader.engine.load_s)


def _counting(counts: Counts) -> str:
    return f"counting tokens: {counted(counts.calls, 'request')}, {counts.prompt_tokens:,} tokens"


def _measuring(done: int, seconds: float) -> str:
    left = BEGIN_S - seconds
    return f"measuring: {counted(done, 'answer')}, {format_clock(left) + ' left' if left > 0 else 'finishing'}"


def _check(source: Path, counts: Counts) -> None:
    """Raise an error if there is no line to answer."""
    if counts.first_problem is not None and not counts.calls:
        number, words = counts.first_problem
        raise LlmrunError(f"{source}: no line can be answered; line {number:,}: {words}")


@contextmanager
def _opened(wanted: WorkersWanted, settings: Settings) -> Iterator[CallReader]:
    """Open the model in this process with the options that a worker would use in another process."""
    from llmrun.base.errors import kernel_warnings_told
    from llmrun.cli.answers.answering import model_files, smaller_ones_named, tell_of_too_many_threads, to_open
    from llmrun.engine.child.opening import describe, open_engine

    tell_of_too_many_threads(settings)
    with model_files(settings, sequences=wanted.parallel, images=wanted.images) as files:
        opening = to_open(
            settings, files, parallel=wanted.parallel, kv_tokens=wanted.kv_tokens, template=wanted.template
        )
        with kernel_warnings_told(out.note), smaller_ones_named(files.found.entry):
            engine = open_engine(opening, lambda message: _tell(message, files.loading), lambda ids: None)
        with engine:
            files.loading.end()
            yield CallReader(engine, describe(engine, opening))


def _tell(message: Loading | Note, loading: ModelLoading) -> None:
    from llmrun.engine.child.messages import Loading

    if isinstance(message, Loading):
        loading(message.work, message.fraction)
    else:
        out.detail(message.text)
