"""The keyboard while no prompt reads it: what is typed is not echoed into the answer, and waits for the next prompt.

- No echo, and no editing of lines by the terminal driver: a line it holds back may have 4,095 characters at most, what
  is pasted beyond that is lost, and Ctrl-D would end the input.
- Enter stays what the key sends, as the prompt expects it; the driver would make a newline of it.
- Ctrl-C stays a signal, but throws nothing away: by default the driver drops what is typed ahead, and with it output
  that the terminal has not read yet, which may be half of what moves its cursor.
- A thread reads what is typed. The driver's queue holds 4,096 bytes; when it is full, the driver does not see the next
  key, and Ctrl-C is a key.
- Pastes stay bracketed, so that the next prompt does not take the lines of a paste for turns.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from llmrun.cli.console.terminal import is_terminal

try:
    import termios
except ImportError:  # Windows, whose console echoes only what a program reads
    termios = None  # type: ignore[assignment]

_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # where they stand in what tcgetattr returns
_UNREACHABLE = (OSError, ValueError)  # the terminal is gone, or the file is closed
_BRACKETED, _UNBRACKETED = b"\x1b[?2004h", b"\x1b[?2004l"
_ERASE_LINE = b"\r\x1b[K"
_CTRL_C = b"\x03"
_AT_ONCE = 1 << 16  # bytes of one read
_PAUSE_S = 0.1  # before the next look at a terminal that cannot be read now


class QuietKeyboard:
    """A terminal's input modes, ours from `begin` to `end`, and given back whenever the process is stopped (Ctrl-Z).

    From `hold` to `release`, what is typed is read and kept for `taken`. Works in the main thread. On Windows, and when
    `descriptor` is no terminal, nothing is changed.

    screen  the descriptor that escape sequences for the terminal are written to; None writes none
    """

    def __init__(self, descriptor: int, screen: int | None = None) -> None:
        self.descriptor = descriptor
        self._screen = screen
        self._holder = _Holder(descriptor, self._in_foreground)
        self._found: list[Any] | None = None  # the modes before `begin`
        self._quiet: list[Any] | None = None  # the ones in between
        self._handlers: dict[int, Any] = {}
        self.paused = False  # someone else has set modes of his own for a while: keep away from them

    def begin(self) -> None:
        if termios is None or self._found is not None or not os.isatty(self.descriptor):
            return
        try:
            self._found = termios.tcgetattr(self.descriptor)
            quiet = termios.tcgetattr(self.descriptor)
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
        if self._in_foreground() and select.select([self.descriptor], [], [], 0)[0]:  # typed earlier, and echoed
            self._write(_ERASE_LINE)

    def quiet(self) -> None:
        """Our modes, again. Nothing before `begin` and after `end`, nor in the background, where it would stop us."""
        if self._quiet is not None and self._in_foreground():
            self._set(self._quiet)
            self._write(_BRACKETED)

    def hold(self) -> None:
        """Read what is typed from here on, and keep it for `taken`. Does nothing before `begin` and after `end`."""
        if self._found is not None:
            self._holder.start()

    def release(self) -> None:
        """Leave what is typed from here on to the next reader."""
        self._holder.stop()

    def taken(self) -> bytes:
        """Return what was typed from `hold` to `release`, once."""
        return self._holder.taken()

    def restore(self) -> None:
        """The modes that were found, at once; may be called from a signal handler, and again. Raises nothing."""
        if self._found is not None and self._in_foreground():
            self._write(_UNBRACKETED)
            self._set(self._found)

    def end(self) -> None:
        self.release()
        self.restore()
        self._found = self._quiet = None
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _set(self, modes: list[Any]) -> None:
        # At once, and without dropping what is typed ahead.
        with suppress(termios.error, *_UNREACHABLE):
            termios.tcsetattr(self.descriptor, termios.TCSANOW, modes)

    def _write(self, sequence: bytes) -> None:
        if self._screen is not None:
            with suppress(*_UNREACHABLE):
                os.write(self._screen, sequence)

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
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


def quiet_keyboard() -> QuietKeyboard:
    """Return the keyboard of a chat at a terminal, begun."""
    keyboard = QuietKeyboard(sys.stdin.fileno(), screen().fileno())
    keyboard.begin()
    return keyboard


def screen() -> TextIO:
    """Return the stream that prompts are shown on, which leaves stdout alone where it can."""
    return sys.stderr if is_terminal(sys.stderr) else sys.stdout


class _Holder:
    """A thread that reads a terminal while no prompt does.

    may_read  whether reading is allowed now: in the background, it would stop the process
    """

    def __init__(self, descriptor: int, may_read: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._may_read = may_read
        self._held = bytearray()
        self._thread: threading.Thread | None = None
        self._stop = -1  # the pipe whose closing ends the thread

    def start(self) -> None:
        if self._thread is None:
            stopped, self._stop = os.pipe()
            self._thread = threading.Thread(target=self._read, args=(stopped,), name="llmrun-keyboard", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """When this returns, the thread reads nothing more."""
        if self._thread is not None:
            os.close(self._stop)
            self._thread.join()
            self._thread = None

    def taken(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _read(self, stopped: int) -> None:
        # Signals belong to the main thread: it may be waiting for one. A blocked SIGTTIN makes a read in the background
        # fail instead of stopping the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while stopped not in select.select([self._descriptor, stopped], [], [])[0]:
            data = b""
            if self._may_read():
                with suppress(*_UNREACHABLE):
                    data = os.read(self._descriptor, _AT_ONCE)
            if not data:  # in the background, or the terminal is gone
                select.select([stopped], [], [], _PAUSE_S)
            if _CTRL_C in data:  # typed before our modes were set, so it was no signal
                os.kill(os.getpid(), signal.SIGINT)
            self._held += data.replace(_CTRL_C, b"")
        os.close(stopped)
