"""The keyboard while nobody reads it: what is typed is not echoed into the answer, and waits for the next prompt.

- No echo, and no editing of lines by the terminal driver: a line it holds back may have 4,095 characters at most, what
  is pasted beyond that is lost, and Ctrl-D would end the input.
- Enter stays what the key sends, as the prompt expects it; the driver would make a newline of it.
- Ctrl-C stays a signal, but throws nothing away: by default the driver drops what is typed ahead, and with it output
  that the terminal has not read yet, which may be half of what moves its cursor.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

try:
    import termios
except ImportError:  # Windows, whose console echoes only what a program reads
    termios = None  # type: ignore[assignment]

_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # where they stand in what tcgetattr returns
_UNREACHABLE = (OSError, ValueError)  # the terminal is gone, or the file is closed


class QuietKeyboard:
    """A terminal's input modes, ours from `begin` to `end`, and given back whenever the process is stopped (Ctrl-Z).

    Works in the main thread. On Windows, and when `descriptor` is no terminal, nothing is changed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._found: list[Any] | None = None  # the modes before `begin`
        self._quiet: list[Any] | None = None  # the ones in between
        self._handlers: dict[int, Any] = {}
        self.paused = False  # someone else has set modes of his own for a while: keep away from them

    def begin(self) -> None:
        if termios is None or self._found is not None or not os.isatty(self._descriptor):
            return
        try:
            self._found = termios.tcgetattr(self._descriptor)
            quiet = termios.tcgetattr(self._descriptor)
        except termios.error:
            return
        quiet[_INPUT] &= ~termios.ICRNL
        quiet[_LOCAL] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
        quiet[_LOCAL] |= termios.ISIG | termios.NOFLSH
        quiet[_CHARACTERS] = list(quiet[_CHARACTERS])
        quiet[_CHARACTERS][termios.VMIN], quiet[_CHARACTERS][termios.VTIME] = 1, 0
        self._quiet = quiet
        for number, handler in ((signal.SIGTSTP, self._on_stop), (signal.SIGCONT, self._on_continue)):
            self._handlers[number] = signal.signal(number, handler)
        self.quiet()

    def quiet(self) -> None:
        """Our modes, again. Nothing before `begin` and after `end`, nor in the background, where it would stop us."""
        if self._quiet is not None and self._in_foreground():
            self._set(self._quiet)

    def restore(self) -> None:
        """The modes that were found, at once; may be called from a signal handler, and again. Raises nothing."""
        if self._found is not None and self._in_foreground():
            self._set(self._found)

    def end(self) -> None:
        self.restore()
        self._found = self._quiet = None
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _set(self, modes: list[Any]) -> None:
        # At once, and without dropping what is typed ahead.
        with suppress(termios.error, *_UNREACHABLE):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, modes)

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except _UNREACHABLE:
            return False

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets the terminal as it was."""
        self.restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we go on: at once where no shell could ever continue us
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._on_continue(number, frame)

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        if not self.paused:
            self.quiet()
