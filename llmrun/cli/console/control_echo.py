"""Hides the `^C` that a terminal shows when Ctrl-C is pressed, because it would appear in the middle of an answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

_LOCAL = 3  # index into the list returned by tcgetattr


def hide_control_echo() -> Callable[[], None]:
    """Stop showing control characters on the terminal of stdin. Return an idempotent function that undoes this.

    If stdin is not a terminal, or if the process is in the background, nothing is changed. On Windows, consoles do not
    show control characters.
    """
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        return lambda: None
    descriptor = sys.stdin.fileno()
    if not _change(descriptor, shown=False):
        return lambda: None

    def show() -> None:
        _change(descriptor, shown=True)

    return show


def _change(descriptor: int, *, shown: bool) -> bool:
    """Turn the ECHOCTL mode on or off. Return whether it was changed."""
    if sys.platform == "win32":
        return False
    import termios

    with suppress(termios.error, OSError):
        # In the background, changing the modes would stop the process.
        modes = termios.tcgetattr(descriptor)
        if bool(modes[_LOCAL] & termios.ECHOCTL) == shown or os.tcgetpgrp(descriptor) != os.getpgrp():
            return False
        modes[_LOCAL] ^= termios.ECHOCTL
        termios.tcsetattr(descriptor, termios.TCSANOW, modes)
        return True
    return False
