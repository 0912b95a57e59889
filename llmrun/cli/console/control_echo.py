"""Keeps Ctrl-C on a terminal from disturbing what llmrun writes.

By default, a terminal shows `^C` in the middle of an answer and discards what it has not shown yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from llmrun.cli.console.terminal import discard_input

_LOCAL = 3  # index into the list returned by tcgetattr


def hide_control_echo() -> Callable[[], None]:
    """Stop showing control characters on the terminal of stdin. Return an idempotent function that undoes this.

    If stdin is not a terminal, or if the process is in the background, nothing is changed. On Windows, consoles do not
    show control characters.
    """
    if sys.platform == "win32":
        return lambda: None
    import termios

    return _set_modes(termios.ECHOCTL, 0)


def keep_output_at_ctrl_c() -> Callable[[], None]:
    """Hide control characters too, and stop the terminal of stdin from discarding output at Ctrl-C.

    The terminal then keeps typed input as well, so a handler of SIGINT should call `discard_typed_input`.
    """
    if sys.platform == "win32":
        return lambda: None
    import termios

    return _set_modes(termios.ECHOCTL | termios.NOFLSH, termios.NOFLSH)


def discard_typed_input() -> None:
    """Discard what was typed on the terminal of stdin, as terminals do at Ctrl-C by default."""
    if _owns_terminal():
        discard_input(sys.stdin.buffer)


def _owns_terminal() -> bool:
    """Return whether stdin is a terminal and this process is in its foreground.

    A process in the background would be stopped if it changed the terminal.
    """
    if sys.platform == "win32" or sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        return False
    with suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def _set_modes(mask: int, wanted: int) -> Callable[[], None]:
    """Set the local modes in `mask` if they can be set now. Return an idempotent function that undoes this."""
    before = _change(mask, wanted)
    if before is None or before == wanted:
        return lambda: None

    def restore() -> None:
        _change(mask, before)

    return restore


def _change(mask: int, modes: int) -> int | None:
    """Set the local modes in `mask` and return their earlier values, or None if they cannot be changed."""
    if sys.platform == "win32" or not _owns_terminal():
        return None
    import termios

    with suppress(termios.error, OSError):
        descriptor = sys.stdin.fileno()
        attributes = termios.tcgetattr(descriptor)
        before: int = attributes[_LOCAL] & mask
        attributes[_LOCAL] = attributes[_LOCAL] & ~mask | modes
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        return before
    return None
