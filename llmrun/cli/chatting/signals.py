"""Ctrl-C, SIGTERM and SIGHUP over a whole chat.

Python's own handler raises KeyboardInterrupt between any two instructions: in the middle of a chat that would be
between the answer and its last line in the file. So one handler stands from the first prompt to the last, and raises
only while a turn is being read; at any other moment it notes the wish and asks the engine to stop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STUCK_S = 3.0  # a stop takes one step of the engine, well under a second

_HEEDED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Signals:
    """`cancel` stops the engine, `restore` puts the terminal back. Both are called from the handler.

    A second Ctrl-C within one answer is the same wish as the first. Only when the first has had no effect for
    STUCK_S is the process left at once, its terminal restored.
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
            if before != signal.SIG_IGN:  # `nohup`, or `&` in a script: it stays so
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
        """A signal came since the last turn was read."""
        return bool(self._received)

    @property
    def exit_code(self) -> int:
        """Of the signal that came since the last turn was read: one that ends programs before Ctrl-C. 0: none."""
        return max((128 + number for number in self._received), key=lambda code: code != 128 + signal.SIGINT, default=0)

    @property
    def end_wanted(self) -> bool:
        """A signal came that ends the program whatever it does."""
        return any(number != signal.SIGINT for number in self._received)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a turn is read: Ctrl-C raises KeyboardInterrupt, what ends programs raises SystemExit."""
        try:
            self._reading = True
            if self.end_wanted:  # it came after the last turn was over
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
