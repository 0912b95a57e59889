"""Runs a server until a signal: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from socket import socket
from types import FrameType
from typing import Any, Protocol

from llmrun.serving.http_server import HttpServer
from llmrun.serving.model import ServedModel

_LAST_WORDS_S = 2.0  # time for the clients to receive the last events before their connections are aborted


class StopSignals:
    """SIGINT and SIGTERM. The first one drains the server, the second one stops it at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Receive the process's signals while the block runs, which must be in the main thread."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.receive)

        # The loop wakes up for signals only if it knows of them; Windows has no such function, and needs none.
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            if sys.platform == "win32":
                signal.signal(number, handle)
            else:
                loop.add_signal_handler(number, self.receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                if sys.platform != "win32":
                    loop.remove_signal_handler(number)
                signal.signal(number, handler)


class OwnedModel(ServedModel, Protocol):
    """A model that the server opens and closes."""

    async def start(self) -> None:
        """Open the model. Raises its error if it cannot be opened."""

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests, let the others finish, and end those that still run after `seconds`."""

    async def close(self) -> None:
        """End all requests with an error, and free all resources. Idempotent."""


async def run_server(
    server: HttpServer,
    model: OwnedModel,
    listening: socket,
    *,
    drain_s: float,
    ready: Callable[[], None],
    say: Callable[[str], None],
    signals: StopSignals,
) -> None:
    """Serve until a signal. While the model is being opened, requests get errors that say so.

    Raises the error of a model that cannot be opened.

    drain_s  how long running requests may continue after the signal, in seconds
    ready    called when the model is open
    say      called with a line about shutting down
    """
    await server.start(listening)
    try:
        if await _before(signals.first, model.start()):
            ready()
            await signals.first.wait()
            server.stop_listening()
            if model.load.running + model.load.waiting:
                say(f"stopping: running answers get up to {drain_s:g} s; press Ctrl-C again to stop at once")
            await _before(signals.second, model.drain(drain_s))
    finally:
        await model.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await server.finished()
        await server.close()


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it when `stop` is set. Returns whether it was completed. Raises its errors."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
