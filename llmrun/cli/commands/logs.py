"""Show logged answers.

With `llmrun generate --log`, or `log = true` in config.toml, each answer is logged with its prompt, model, sampling,
seed and timings, in a file that only you can read. If you give WORDs, only answers that contain all of them are
shown. The newest answer comes last.

Examples:
    llmrun logs
    llmrun logs -n 1 --full
    llmrun logs sky blue --json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.answers.answer_log import AnswerLog, Entry

LISTING = {"heading": "Manage files", "place": 116}
_HEADER = ("TIME", "MODEL", "PROMPT", "ANSWER")
_USUAL_COUNT = 10
_LEAST_CELL = 12  # minimum width in columns
_PIPED_CELL = 60  # width in columns if stdout is not a terminal


def command(
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="Words to search for.")] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            metavar="N",
            min=0,
            help=f"Number of answers to show; 0 shows all.  [default: {_USUAL_COUNT}]",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show complete prompts and answers.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Print only the path of the log file.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the log without confirmation.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the entries as a JSON array.")] = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    if clear and (words or count is not None or full or path or json_output):
        raise UsageError("--clear: cannot be combined with words or other flags, because the whole log is removed")

    from llmrun.cli.answers.answer_log import answer_log

    log = answer_log()
    if path:
        out.lines([str(log.path)])
        return 0
    try:
        if clear:
            out.lines([f"{counted(log.clear(), 'logged answer')} removed"])
            return 0
        return _show(log, words or (), _USUAL_COUNT if count is None else count or None, full, json_output)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise LlmrunError(f"log: {error.filename or log.path}: {error.strerror or error}") from error


def _show(log: AnswerLog, words: Sequence[str], count: int | None, full: bool, json_output: bool) -> int:
    found = log.last(count, words)
    if found.damaged:
        out.note(f"skipped {counted(found.damaged, 'unreadable line')} in {log.path}")
    if json_output:
        out.json_list(found.entries)
    elif not found.entries:
        hint = "`llmrun generate --log` logs an answer; `log = true` in config.toml logs every answer"
        out.lines(["No logged answer contains all of these words." if words else f"No answers logged yet. {hint}."])
    elif full:
        for number, entry in enumerate(found.entries):
            out.lines([""] if number else [])
            _show_whole(entry)
    else:
        _show_table(found.entries)
    return 0


def _show_table(entries: Sequence[Entry]) -> None:
    from llmrun.cli.console.output import aligned
    from llmrun.cli.console.terminal import room, shortened, visible_line, width

    def cut(text: str, most: int) -> str:
        line = " ".join(visible_line(text).split())
        return line if width(line) <= most else shortened(line, most - 1) + "…"

    stamped = [(_moment(entry), cut(entry["model"], 24)) for entry in entries]
    taken = max(width(moment) + width(model) for moment, model in [*stamped, _HEADER[:2]]) + 6
    cell = min(max((room(sys.stdout) - taken) // 2, _LEAST_CELL), _PIPED_CELL)
    rows = [
        (*stamp, cut(entry["prompt"], cell), cut(_told(entry), cell))
        for stamp, entry in zip(stamped, entries, strict=True)
    ]
    head, *lines = aligned([_HEADER, *rows])
    out.lines([head], dim=True)
    out.lines(lines)


def _show_whole(entry: Entry) -> None:
    facts = [_moment(entry), entry["model"]]
    facts += [f"{name} {entry[name]}" for name in ("preset", "template") if entry.get(name) is not None]
    facts += [] if entry.get("seed") is None else [f"seed {entry['seed']}"]
    facts += [] if entry["finish_reason"] == "stop" else [entry["finish_reason"]]
    out.lines(["  ".join(facts)], dim=True)
    if entry.get("system"):
        out.lines([f"system: {line}" for line in str(entry["system"]).splitlines()])
    images = entry.get("images")
    for image in images if isinstance(images, list) else ():
        out.lines([f"image: {image.get('name')}"] if isinstance(image, dict) else [])
    out.lines([f"> {line}" for line in entry["prompt"].splitlines()])
    if entry.get("suffix"):
        out.lines([f"suffix: {line}" for line in str(entry["suffix"]).splitlines()])
    out.lines(entry["answer"].splitlines())


def _told(entry: Entry) -> str:
    """Return the answer, with a mark if it was cancelled."""
    return f"({entry['finish_reason']}) {entry['answer']}" if entry["finish_reason"] == "cancelled" else entry["answer"]


def _moment(entry: Entry) -> str:
    """Return an entry's local time, or the raw value of the field `time` if the value is not a valid time."""
    try:
        return f"{datetime.fromisoformat(entry['time']).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return str(entry["time"])
