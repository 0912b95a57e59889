"""Collects keys that are typed while no prompt is active, and passes them to the next prompt without echoing them.

- Echo and the terminal driver's line editing are disabled. With line editing, Ctrl-D would end the input, and long
  pastes would be truncated, because the driver's lines have at most 4,095 characters.
- Enter produces a carriage return, as the prompt expects, although the driver's default is a newline.
- Ctrl-C still sends a signal, but no longer flushes the queues. By default, the driver discards typed-ahead keys and
  any output that the terminal has not read yet, which may cut an escape sequence in half.
- A thread reads the keys, because the driver's queue holds only 4,096 bytes. When the queue is full, the driver accepts
  no more keys, not even Ctrl-C.
- Bracketed paste stays enabled, because the next prompt would otherwise treat each line of a paste as a turn.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

from llmrun.cli.console.terminal import is_terminal

_INPUT, _LOCAL, _CHARACTERS = 0, 3, 6  # indices into the list returned by tcgetattr
_UNREACHABLE = (OSError, ValueError)  # errors raised if the terminal has disconnected or the file is closed
_BRACKETED, _UNBRACKETED = b"\x1b[?2004h", b"\x1b[?2004l"
_ERASE_LINE = b"\r\x1b[K"
_CTRL_C = b"\x03"
_AT_ONCE = 1 << 16  # maximum bytes per read
_PAUSE_S = 0.1  # delay before retrying if the terminal cannot be read now


class QuietKeyboard:
    """Sets a terminal's input modes from `begin` to `end`, and restores the old modes during suspension (Ctrl-Z).

    Keys typed between `hold` and `release` are buffered, and `taken` returns them. Use this class only in the main
    thread. The class does nothing if `descriptor` is not a terminal, or on Windows, where the console echoes keys only
    when a program reads them.

    screen  file descriptor for escape sequences, or None to write none
    """

    def __init__(self, descriptor: int, screen: int | None = None) -> None:
        self.descriptor = descriptor
        self._screen = screen
        self._held = bytearray()
        self._thread: threading.Thread | None = None  # reads keys between `hold` and `release`
        self._stop = -1  # the write end of a pipe; closing it ends the thread
        self._found: list[Any] | None = None  # the modes before `begin`
        self._quiet: list[Any] | None = None  # the modes between `begin` and `end`
        self._handlers: dict[int, Any] = {}
        self.paused = False  # True while a prompt or another program sets its own modes, which must not be changed

    def begin(self) -> None:
        if sys.platform == "win32" or self._found is not None or not os.isatty(self.descriptor):
            return
        import termios

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
        if self._in_foreground() and select.select([self.descriptor], [], [], 0)[0]:  # earlier keys were echoed
            self._write(_ERASE_LINE)

    def quiet(self) -> None:
        """Set the quiet modes again. Does nothing before `begin`, after `end` or in the background.

        Changing the modes of the terminal would stop a process in the background.
        """
        if self._quiet is not None and self._in_foreground():
            self._set(self._quiet)
            self._write(_BRACKETED)

    def hold(self) -> None:
        """Start a thread that reads keys and buffers them for `taken`. Does nothing before `begin` or after `end`."""
        if self._found is not None and self._thread is None:
            stopped, self._stop = os.pipe()
            self._thread = threading.Thread(target=self._read, args=(stopped,), name="llmrun-keyboard", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Stop the thread and wait until it has ended, so that another reader can read keys."""
        if self._thread is not None:
            os.close(self._stop)
            self._thread.join()
            self._thread = None

    def taken(self) -> bytes:
        """Return and clear the bytes that were typed between `hold` and `release`."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def restore(self) -> None:
        """Restore the original modes. This method is idempotent, never raises, and is safe in a signal handler."""
        if self._found is not None and self._in_foreground():
            self._write(_UNBRACKETED)
            self._set(self._found)

    def end(self) -> None:
        self.release()
        self.restore()
        self._found = self._quiet = None
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _read(self, stopped: int) -> None:
        if sys.platform == "win32":
            return
        # Block all signals in this thread, because the main thread may be waiting for a signal. With SIGTTIN blocked,
        # reading in the background fails instead of stopping the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while stopped not in select.select([self.descriptor, stopped], [], [])[0]:
            data = b""  # in the background, reading would stop the process
            if self._in_foreground():
                with suppress(*_UNREACHABLE):
                    data = os.read(self.descriptor, _AT_ONCE)
            if not data:  # the process is in the background, or the terminal has disconnected
                select.select([stopped], [], [], _PAUSE_S)
            if _CTRL_C in data:  # Ctrl-C was typed before the modes were set, so it did not send a signal
                os.kill(os.getpid(), signal.SIGINT)
            self._held += data.replace(_CTRL_C, b"")
        os.close(stopped)

    def _set(self, modes: list[Any]) -> None:
        if sys.platform == "win32":
            return
        import termios

        # TCSANOW takes effect immediately and does not discard typed-ahead keys.
        with suppress(termios.error, *_UNREACHABLE):
            termios.tcsetattr(self.descriptor, termios.TCSANOW, modes)

    def _write(self, sequence: bytes) -> None:
        if self._screen is not None:
            with suppress(*_UNREACHABLE):
                os.write(self._screen, sequence)

    def _in_foreground(self) -> bool:
        if sys.platform == "win32":
            return True
        try:
            return os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except _UNREACHABLE:
            return False

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """After Ctrl-Z, restore the terminal modes for the shell and suspend the process."""
        if sys.platform == "win32":
            return
        self.restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        # This call returns when the process continues, or immediately if there is no shell that could continue it.
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._on_continue(number, frame)

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        if not self.paused:
            self.quiet()


def quiet_keyboard() -> QuietKeyboard:
    """Return a new keyboard on stdin, after calling its `begin`."""
    keyboard = QuietKeyboard(sys.stdin.fileno(), screen().fileno())
    keyboard.begin()
    return keyboard


def screen() -> TextIO:
    """Return the stream for prompts, which is stderr if stderr is a terminal, and stdout otherwise."""
    return sys.stderr if is_terminal(sys.stderr) else sys.stdout
