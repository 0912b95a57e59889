"""Runs `llmrun batch --dry-run`, which predicts what a batch takes and writes only a report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.amounts import counted, format_clock
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.machine.energy import EnergyMeter, nvml_sources, rapl_sources
from llmrun.cli.batching.dry_run_report import Comparison, body_of, lines_of
from llmrun.cli.batching.workers import LOCAL, WorkersWanted
from llmrun.cli.console.control_echo import hide_control_echo
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import show_loading
from llmrun.jobs.batching.estimate.counting import Counts, count_batch
from llmrun.jobs.batching.estimate.estimating import Estimate, estimate_of
from llmrun.jobs.batching.estimate.prediction import ApiPrice
from llmrun.jobs.batching.estimate.reading import CallReader
from llmrun.jobs.batching.estimate.sampling import BEGIN_S, Sampler
from llmrun.jobs.batching.lines import check_source

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Loading, Note
    from llmrun.jobs.batching.requests import CallOptions
    from llmrun.options.settings import Settings


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
        out.json(body_of(estimate, comparison))
    else:
        out.lines(lines_of(estimate, comparison))
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
    from llmrun.base.kernel_warnings import kernel_warnings_told
    from llmrun.cli.answers.open_model import model_files, smaller_ones_named, tell_of_too_many_threads
    from llmrun.cli.answers.opening import to_open
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
