"""Shows tool calls as rows of text that contain everything that a tool receives, or else state that text is left out.

Names, arguments, descriptions and results are untrusted. Characters that a terminal does not show, such as zero-width
spaces, are written as escapes, because they could hide a part of a call from the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.cli.console.terminal import visible_line
from llmrun.engine.tools.tool import Limits, ToolInfo, ToolResult, decode_json


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; an empty text means no arguments. Raises ValueError with the reason."""
    if not text.strip():
        return {}
    arguments = decode_json(text.encode(), Limits().depth)
    if not isinstance(arguments, dict):
        raise ValueError("the value has another type")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string contains a lone surrogate") from None
    return arguments


_MOST_ROWS = 12
_LONGEST_ROW = 300  # maximum length of a row in characters
_LONGEST_ON_ONE_LINE = 80
_LONGEST_SUMMARY = 100
_MOST_SUMMARIZED = 10_000  # characters of a text that a summary considers


def call_rows(info: ToolInfo, arguments: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the rows that show a call, and whether the rows show the whole call."""
    rows, complete = _argument_rows(arguments), True
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], f"… {len(rows) - _MOST_ROWS:,} more lines"]
        complete = False
    for number, row in enumerate(rows):
        if len(row) > _LONGEST_ROW:
            rows[number] = f"{row[:_LONGEST_ROW]}… {len(row) - _LONGEST_ROW:,} more characters"
            complete = False
    return _joined(f"tool {_title(info)}", rows), complete


def full_rows(info: ToolInfo, arguments: Mapping[str, Any]) -> list[str]:
    """Return the rows that show a call without omissions, with the tool's description and its parameters."""
    return [*_joined(f"tool {_title(info)}", _argument_rows(arguments)), *about_rows(info)]


def about_rows(info: ToolInfo) -> list[str]:
    """Return the rows that show a tool's description and its parameters."""
    description = [f"  {_escaped(line)}" for line in info.description.splitlines()]
    return ["description", *description, "parameters", *(f"  {row}" for row in _argument_rows(info.schema))]


def result_row(result: ToolResult) -> str:
    """Return a row that summarizes a result: its beginning, its length and the duration of the call."""
    size = f"{len(result.text):,} characters" + (", cut" if result.truncated else "")
    return f"{'failed' if result.is_error else 'result'}: {_summary(result.text)} ({size}, {result.seconds:.1f} s)"


def past_call_row(name: str, arguments: str) -> str:
    """Return a row that summarizes a tool call of a saved conversation. The arguments may be any text."""
    return f"tool {_summary(name)} {_summary(arguments or '{}')}"


def past_result_row(text: str) -> str:
    """Return a row that summarizes a result of a saved conversation."""
    return f"result: {_summary(text)} ({len(text):,} characters)"


def tool_rows(tools: Sequence[ToolInfo]) -> list[str]:
    """Return one row per tool, with the tool's source and whether the tool runs without confirmation."""
    return [f"{_title(info)}{_permission(info)}  {_first_sentence(info.description)}" for info in tools]


def _summary(text: str) -> str:
    """Return the beginning of a text on one line, or "(no text)"."""
    shown = _escaped(" ".join(text[:_MOST_SUMMARIZED].split())) or "(no text)"
    return shown if len(shown) <= _LONGEST_SUMMARY else f"{shown[:_LONGEST_SUMMARY]}…"


def _joined(head: str, rows: Sequence[str]) -> list[str]:
    if len(rows) == 1 and len(rows[0]) <= _LONGEST_ON_ONE_LINE:
        return [f"{head} {rows[0]}"]
    return [head, *(f"  {row}" for row in rows)]


def _title(info: ToolInfo) -> str:
    """Return a tool's name, with the tool's server and, if different, the server's own name for the tool."""
    if not info.server:
        return info.name
    original = "" if info.original == info.name else f": {_escaped(info.original)}"
    return f"{info.name} (server {_escaped(info.server)}{original})"


def _permission(info: ToolInfo) -> str:
    if info.is_safe:
        return ", runs without asking"
    return f", asks because {_escaped(info.why_not)}" if info.why_not else ""


def _first_sentence(description: str) -> str:
    line = _escaped(visible_line(description.strip().partition("\n")[0]))
    return line if len(line) <= _LONGEST_SUMMARY else f"{line[:_LONGEST_SUMMARY]}…"


def _argument_rows(value: Mapping[str, Any]) -> list[str]:
    """Return a JSON value on one line if it is short, and pretty-printed otherwise."""
    compact = json.dumps(value, ensure_ascii=False)
    text = compact if len(compact) <= _LONGEST_ON_ONE_LINE else json.dumps(value, ensure_ascii=False, indent=2)
    return [_escaped(line) for line in text.split("\n")]


def _escaped(line: str) -> str:
    """Replace characters that terminals do not show with JSON escapes, which do not change a JSON text's value."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)
