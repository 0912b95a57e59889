"""Handles Ctrl-C, SIGTERM and SIGHUP during a chat.

Python's default handler can raise KeyboardInterrupt between any two instructions, for example after the end of an
answer but before the answer is saved. The handler in this module is installed for the whole chat and raises an
exception only while a turn is being read. At other times, the handler records the signal and asks the engine to stop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from llmrun.base.processes.commands import HANGUP, TERMINATING

STUCK_S = 3.0  # stopping normally takes one engine step, which is much less than a second

_HEEDED = (signal.SIGINT, *TERMINATING, *HANGUP)


class Signals:
    """A context manager that handles the signals of a chat.

    cancel   a function that stops the engine
    restore  a function that restores the terminal

    The signal handler calls `cancel` and `restore`. If the engine has not stopped within STUCK_S seconds, a second
    Ctrl-C during the same answer restores the terminal and exits immediately. An earlier second Ctrl-C has no effect.
    """

    def __init__(self, cancel: Callable[[], None], restore: Callable[[], None]) -> None:
        self._cancel = cancel
        self._restore = restore
        self._reading = False
        self._first_at = 0.0
        self._received: list[int] = []
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Signals:
        for number in _HEEDED:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # keep ignoring signals that `nohup`, or `&` in a script, has disabled
                self._before[number] = before
                signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def stop_wanted(self) -> bool:
        """True if a signal has arrived since the last turn was read."""
        return bool(self._received)

    @property
    def exit_code(self) -> int:
        """The exit code for signals received since the last turn was read, or 0. SIGTERM and SIGHUP outrank Ctrl-C."""
        return max((128 + number for number in self._received), key=lambda code: code != 128 + signal.SIGINT, default=0)

    @property
    def end_wanted(self) -> bool:
        """True if SIGTERM or SIGHUP has arrived. Either signal ends the chat at any time."""
        return any(number != signal.SIGINT for number in self._received)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the context, make Ctrl-C raise KeyboardInterrupt, and make SIGTERM and SIGHUP raise SystemExit."""
        try:
            self._reading = True
            if self.end_wanted:  # the signal arrived after the last turn
                raise SystemExit(self.exit_code)
            self._received.clear()
            yield
        finally:
            self._reading = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._reading:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        now = time.monotonic()
        if not self._received:
            self._first_at = now
        elif now - self._first_at > STUCK_S:
            self._restore()
            os._exit(128 + number)
        self._received.append(number)
        self._cancel()
