"""The doctor's terminal check, which reports the width, colors and encoding that llmrun detects."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_color, columns, is_terminal
from llmrun.jobs.doctor.findings import NOTE, OK, Finding
from llmrun.jobs.doctor.machine import Machine

SECTION = "Terminal"
_NARROW = 60


def look_at_terminal(machine: Machine) -> Iterator[Finding]:
    del machine
    terminal, color, utf8 = is_terminal(sys.stdout), can_color(sys.stdout, out.color), _locale_is_utf8()
    facts = {
        "stdout_is_terminal": terminal,
        "stdin_is_terminal": is_terminal(sys.stdin),
        "color": color,
        "utf8": utf8,
        "columns": columns() if terminal else None,
        "term": os.environ.get("TERM"),
    }
    if not terminal:
        yield Finding(SECTION, "terminal", OK, "the output goes to a file or a pipe, so it is plain text", facts=facts)
        return
    words = f"{columns()} columns, {'colors' if color else 'no colors'}, {'UTF-8' if utf8 else 'not UTF-8'}"
    if not utf8:
        advice = "Text other than ASCII may look wrong. To use a UTF-8 locale:"
        yield Finding(SECTION, "terminal", NOTE, words, advice, "export LC_ALL=C.UTF-8", facts)
    elif columns() < _NARROW:
        yield Finding(SECTION, "terminal", NOTE, f"{words}; tables need at least {_NARROW}", facts=facts)
    else:
        yield Finding(SECTION, "terminal", OK, words, facts=facts)


def _locale_is_utf8() -> bool:
    """Return whether the locale variables indicate UTF-8.

    Python writes UTF-8 regardless of the locale. If no variable is set, UTF-8 is assumed, because current terminals
    support it.
    """
    named = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    return named in ("", "C", "POSIX") or "utf8" in named.lower().replace("-", "")
