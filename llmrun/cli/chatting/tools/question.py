"""Asks the user a question on the terminal, outside the line editor."""

from __future__ import annotations

import sys
from typing import BinaryIO

from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import discard_input, is_terminal

_LONGEST_LINE = 1000  # bytes


def ask(question: str, stream: BinaryIO | None = None) -> str | None:
    """Show a question and return the line that the user types, or None at the end of input.

    Keys that were typed before the question are discarded, so that they cannot answer it by mistake. The terminal must
    be in its original modes (`Turns.lent`). If the user cannot see the question, because stderr is redirected, the
    result is also None.

    stream  None for standard input
    """
    if stream is None and not is_terminal(sys.stderr):
        out.note("calls cannot be confirmed, because standard error is not a terminal")
        return None
    stream = stream or sys.stdin.buffer
    if stream.isatty():
        discard_input(stream)
    out.prompt(question)
    line = stream.readline(_LONGEST_LINE)
    return line.decode(errors="replace").strip() if line else None
