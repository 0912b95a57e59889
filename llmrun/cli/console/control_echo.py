"""Keeps Ctrl-C on a terminal from disturbing an answer.

By default, a terminal shows `^C` in the middle of the answer and discards output that it has not shown yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

_LOCAL = 3  # index into the list returned by tcgetattr


def hide_control_echo() -> Callable[[], None]:
    """Stop showing control characters on the terminal of stdin, and keep output at Ctrl-C.

    Returns an idempotent function that undoes this. If stdin is not a terminal, or if the process is in the background,
    nothing is changed. On Windows, consoles do neither.
    """
    if sys.platform == "win32" or sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        return lambda: None
    import termios

    descriptor = sys.stdin.fileno()
    changed = termios.ECHOCTL | termios.NOFLSH
    before = _change(descriptor, changed, termios.NOFLSH)
    if before is None or before == termios.NOFLSH:
        return lambda: None

    def show() -> None:
        _change(descriptor, changed, before)

    return show


def _change(descriptor: int, mask: int, modes: int) -> int | None:
    """Set the local modes in `mask` and return their earlier values, or None if they cannot be changed now."""
    if sys.platform == "win32":
        return None
    import termios

    with suppress(termios.error, OSError):
        attributes = termios.tcgetattr(descriptor)
        if os.tcgetpgrp(descriptor) != os.getpgrp():  # in the background, changing the modes would stop the process
            return None
        before: int = attributes[_LOCAL] & mask
        attributes[_LOCAL] = attributes[_LOCAL] & ~mask | modes
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        return before
    return None
