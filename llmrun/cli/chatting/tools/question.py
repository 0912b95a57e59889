"""Asks the user a question on the terminal, outside the line editor."""

from __future__ import annotations

import sys
from typing import BinaryIO

from llmrun.cli.console.output import out

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

_LONGEST_LINE = 1000  # bytes


def ask(question: str, stream: BinaryIO | None = None) -> str | None:
    """Show a question and return the line that the user types, or None at the end of input.

    Keys that were typed before the question are discarded, so that they cannot answer it by mistake. The terminal must
    be in its original modes (`Turns.lent`).
    """
    stream = stream or sys.stdin.buffer
    if termios is not None and stream.isatty():
        termios.tcflush(stream.fileno(), termios.TCIFLUSH)
    out.prompt(question)
    line = stream.readline(_LONGEST_LINE)
    return line.decode(errors="replace").strip() if line else None
