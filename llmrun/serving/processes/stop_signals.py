"""Converts SIGINT and SIGTERM to asyncio events."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from llmrun.base.processes.commands import TERMINATING


class StopSignals:
    """The events of SIGINT and SIGTERM. A server drains after the first signal, and stops immediately after the second.

    number  the number of the last signal
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = signal.SIGINT

    def receive(self, number: int = signal.SIGINT) -> None:
        self.number = signal.Signals(number)
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Receive the process's signals while the block runs. The block must run in the main thread."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.receive, number)

        # The event loop wakes up only for signals with a handler. Windows has no such handlers and needs none.
        numbers = (signal.SIGINT, *TERMINATING)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            if sys.platform == "win32":
                signal.signal(number, handle)
            else:
                loop.add_signal_handler(number, self.receive, number)
        try:
            yield
        finally:
            for number, handler in before.items():
                if sys.platform != "win32":
                    loop.remove_signal_handler(number)
                signal.signal(number, handler)
