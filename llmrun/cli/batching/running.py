"""Runs a batch in the terminal: shows its progress, heeds Ctrl-C, and reports how it ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import counted, format_clock, format_number, format_percent, format_seconds
from llmrun.cli.console.control_echo import hide_control_echo
from llmrun.cli.console.output import out
from llmrun.jobs.batching.run import Outcome, run_batch
from llmrun.serving.processes.stop_signals import StopSignals

if TYPE_CHECKING:
    from llmrun.jobs.batching.batch import Batch
    from llmrun.jobs.batching.tally import Tally
    from llmrun.jobs.batching.workers.base import Worker

_SHOWN_NAMES = 5


def run(batch: Batch, workers: Sequence[Worker], *, as_json: bool) -> int:
    """Run a batch, print its statistics, and return the exit code: 0, 1 if a line has an error, or 130 after Ctrl-C."""
    signals, show_control_echo = StopSignals(), hide_control_echo()
    try:
        outcome = asyncio.run(_run(batch, workers, signals, show_control_echo))
    finally:
        show_control_echo()
        out.clear_progress()
    tally = outcome.tally
    if as_json:
        out.json(_body(batch, outcome))
    _tell_of_lines(outcome)
    if not outcome.is_complete:
        answered = f"{tally.done:,} of {tally.lines:,} lines" if tally.lines else "0 lines"
        again = "run the command again without --force" if batch.force else "run the same command again"
        out.note(f"stopped after {answered}; {again} to continue")
        return 128 + signals.number
    out.fields(_statistics(tally))
    if tally.failed:
        retry = "--retry-errors runs them again"
        out.note(f"{counted(tally.failed, 'line')} of {batch.output} {_have(tally.failed)} an error; {retry}")
    return 1 if tally.failed else 0


async def _run(
    batch: Batch, workers: Sequence[Worker], signals: StopSignals, show_control_echo: Callable[[], None]
) -> Outcome:
    async def leave_at_once() -> None:
        await signals.second.wait()
        show_control_echo()
        os._exit(128 + signals.number)  # the journal has all answers, and the engine ends with this process

    with signals.installed():
        leaving = asyncio.create_task(leave_at_once())
        try:
            return await run_batch(batch, workers, _TerminalReporter(), signals.first)
        finally:
            leaving.cancel()


class _TerminalReporter:
    """Shows a batch on one line of the terminal."""

    def progress(self, tally: Tally) -> None:
        out.progress(progress_line(tally))

    def waiting(self, words: str) -> None:
        out.progress(words)

    def note(self, words: str) -> None:
        out.note(words)


def progress_line(tally: Tally) -> str:
    """Return `1,234 of 10,000 lines  12%  3.21 lines/s  402 tok/s  81% cached  5 errors  45:10 left`."""
    share = tally.done / tally.lines if tally.lines else 0.0
    words = [f"{tally.done:,} of {counted(tally.lines, 'line')}", format_percent(share)]
    if tally.calls:
        words += [f"{format_number(tally.per_second)} lines/s"]
        words += [f"{format_number(tally.generated_tokens / tally.seconds)} tok/s"]
    if tally.cached_tokens:
        words.append(f"{format_percent(tally.cached_share)} cached")
    if tally.failed:
        words.append(counted(tally.failed, "error"))
    if tally.remaining_s is not None:
        words.append(f"{format_clock(tally.remaining_s)} left")
    return "  ".join(words)


def _statistics(tally: Tally) -> list[str]:
    answered = tally.done - tally.resumed
    words = [f"{counted(answered, 'line')} in {format_seconds(tally.seconds)}"]
    if tally.resumed:
        words.append(f"{tally.resumed:,} from an earlier run")
    if tally.copied:
        words.append(f"{counted(tally.copied, 'duplicate')}")
    if tally.calls:
        words.append(f"{tally.prompt_tokens:,} prompt tokens, {format_percent(tally.cached_share)} cached")
        speed = format_number(tally.generated_tokens / tally.seconds)
        words.append(f"{tally.generated_tokens:,} generated, {speed} tok/s")
    return words


def _tell_of_lines(outcome: Outcome) -> None:
    names = list(outcome.foreign_models)
    if names:
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        out.note(f"lines that name another model ({shown}) were answered by the model of this run")
    if outcome.tally.ignored:
        shown = ", ".join(sorted(outcome.tally.ignored)[:_SHOWN_NAMES])
        out.note(f"these fields had no effect: {shown}")


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _body(batch: Batch, outcome: Outcome) -> dict[str, Any]:
    tally = outcome.tally
    return {
        "output": str(batch.output),
        "complete": outcome.is_complete,
        "lines": tally.lines,
        "done": tally.done,
        "resumed": tally.resumed,
        "failed": tally.failed,
        "duplicates": tally.copied,
        "requests": tally.calls,
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "generated_tokens": tally.generated_tokens,
        "seconds": round(tally.seconds, 3),
    }
