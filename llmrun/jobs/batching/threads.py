"""Runs work in threads that can be stopped, so that Ctrl-C never has to wait for a large file."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Stopped(Exception):
    """Raised in a thread that was asked to stop."""


class Halt:
    """Asks threads to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask all threads to stop."""
        self._event.set()

    def check(self) -> None:
        """Raise Stopped if this thread should stop. Takes less than a microsecond."""
        if self._event.is_set():
            raise Stopped


async def in_thread(halt: Halt, work: Callable[[], Result]) -> Result:
    """Run `work`, which calls `halt.check` often, in a thread. If this is cancelled, it waits for the thread's end."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        halt.set()
        await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()  # it was probably Stopped, and nobody needs the result any more
        raise
