"""Runs a batch in the terminal, shows its progress, handles Ctrl-C and prints the statistics.

Flags and settings become the options of the batch's calls. The fields of a line take precedence over these options.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from llmrun.base.amounts import counted, format_clock, format_number, format_percent, format_seconds
from llmrun.base.errors import UsageError
from llmrun.cli.arguments.options import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, parse_stops
from llmrun.cli.arguments.prompts import Prompts
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import hide_control_echo
from llmrun.engine.constraint.closing import openai_json_schema
from llmrun.engine.constraint.matcher import schema_of
from llmrun.jobs.batching.intake import check_input
from llmrun.jobs.batching.requests import CallOptions, Default
from llmrun.jobs.batching.run import Outcome, run_batch
from llmrun.options.presets import INPUT
from llmrun.options.sampling_params import SAMPLING
from llmrun.serving.processes.stop_signals import StopSignals
from llmrun.serving.protocol.openai.options import BUDGETS

if TYPE_CHECKING:
    from llmrun.cli.arguments.options import AnswerFlags
    from llmrun.engine.constraint.base import ResponseFormat
    from llmrun.jobs.batching.run import Batch
    from llmrun.jobs.batching.work import Tally
    from llmrun.jobs.batching.workers.base import Worker
    from llmrun.options.settings import Settings

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")
_VARIABLES: Final = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
_FORMATS: Final = ("response_format", "structured_outputs", "json_schema", "grammar", "tools")


def call_options(
    flags: AnswerFlags,
    settings: Settings,
    variables: Mapping[str, Any],
    response_format: ResponseFormat | None,
    *,
    text: bool,
) -> CallOptions:
    """Return the options of a batch's calls. The fields of a line take precedence over these options.

    variables  variables for the chat template
    text       True if each line of the input is a prompt
    """
    defaults = (
        *_sampling(settings),
        *_others(flags, settings, variables),
        *([] if response_format is None else [_format(response_format)]),
    )
    if settings.preset is None or settings.preset.prompt is None:
        system = settings.system if flags.system is None else flags.system
        return CallOptions(settings.fixed_seed or 0, defaults, system, text=text)
    prompts = Prompts.of(settings, flags.prompt_values(), flags.system)
    digest = hashlib.sha256(json.dumps(structs.asdict(prompts)).encode()).hexdigest()
    return CallOptions(settings.fixed_seed or 0, defaults, prompts.system, partial(_filled, prompts), digest, text)


def _sampling(settings: Settings) -> Iterator[Default]:
    for name, value in settings.sampling.items():
        parameter = SAMPLING[name]
        yield Default(parameter.wire, parameter.wire_value(value))


def _others(flags: AnswerFlags, settings: Settings, variables: Mapping[str, Any]) -> Iterator[Default]:
    if settings.token_limit is not None:
        yield Default(_LIMITS, settings.token_limit)
    if flags.stop:
        yield Default(("stop",), [*parse_stops(flags.stop)])
    think = False if settings.think_budget == 0 else settings.think
    switches = {} if think is None else {"enable_thinking": think, "thinking": think}  # chat templates use either name
    if switches or variables:
        yield Default(_VARIABLES, {**switches, **variables})
    if settings.think_budget:
        yield Default(BUDGETS, settings.think_budget)


def _format(wanted: ResponseFormat) -> Default:
    """Return the request field for a format. Only llmrun and vLLM support formats other than JSON."""
    kind = wanted.kind.value
    if kind == JSON_OBJECT:
        return Default(_FORMATS, {"type": "json_object"})
    if kind == JSON_SCHEMA:
        return Default(_FORMATS, {"type": "json_schema", "json_schema": openai_json_schema(schema_of(wanted))})
    value = {REGEX: wanted.text, GRAMMAR: wanted.text, CHOICE: [*wanted.choices]}[kind]
    first, second, *others = _FORMATS
    return Default((second, first, *others), {kind: value})


def _filled(common: Prompts, fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the prompt and the system prompt of a line with these fields. Raises UsageError."""
    values = {name: _value(name, value) for name, value in fields.items()}
    asked = values.pop(INPUT, "")
    prompts = structs.replace(common, values={**common.values, **values})
    if prompts.needs_input and not asked:
        raise UsageError(f"preset {prompts.name}: the line has no field {INPUT}")
    try:
        prompts.check_complete()
    except UsageError as error:
        raise UsageError(str(error)) from None  # the hint is dropped because it is about the command, not about a line
    return prompts.filled(asked)


def _value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value) in (int, float, bool):
        return json.dumps(value)
    raise UsageError(f"{name}: a list or an object cannot be filled into a prompt")


_SHOWN_NAMES = 5


def check_lines(source: Path, options: CallOptions) -> bool:
    """Read the whole input, which takes a few seconds for each 100,000 lines, and return whether any line has an image.

    Raises UsageError for the first bad line.
    The check comes before the model is loaded and before a file is written, so that a mistake can simply be corrected.
    """
    try:
        return check_input(source, options, lambda count: out.progress(f"checking {counted(count, 'line')}"))
    finally:
        out.clear_progress()


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
        if batch.emit is not None:
            out.note(f"stopped after {answered}")
            return 128 + signals.number
        again = "run the command again without --force" if batch.force else "run the same command again"
        out.note(f"stopped after {answered}; {again} to continue")
        return 128 + signals.number
    out.fields(_statistics(tally))
    if tally.failed:
        where = f" of {batch.output}" if batch.emit is None else ""
        retry = "; --retry-errors runs them again" if batch.emit is None else ""
        out.note(f"{counted(tally.failed, 'line')}{where} {_have(tally.failed)} an error{retry}")
    return 1 if tally.failed else 0


async def _run(
    batch: Batch, workers: Sequence[Worker], signals: StopSignals, show_control_echo: Callable[[], None]
) -> Outcome:
    async def leave_at_once() -> None:
        await signals.second.wait()
        show_control_echo()
        os._exit(128 + signals.number)  # the journal contains all answers, and the engine ends with this process

    with signals.installed():
        leaving = asyncio.create_task(leave_at_once())
        try:
            return await run_batch(batch, workers, _TerminalReporter(), signals.first)
        finally:
            leaving.cancel()


class _TerminalReporter:
    """A reporter that shows a batch's progress on one line of the terminal."""

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
