"""Runs a server until a signal: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from socket import socket
from types import FrameType

from llmrun.serving.http_server import HttpServer
from llmrun.serving.service import Service

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


async def run_server(
    server: HttpServer,
    service: Service,
    listening: socket,
    *,
    open_model: Callable[[], Awaitable[None]],
    ready: Callable[[], None],
    say: Callable[[str], None],
    signals: StopSignals,
) -> None:
    """Serve until a signal. While the model is being opened, requests get errors that say so.

    open_model  opens the model; its error ends the server
    ready       called when the model is open
    say         called with a line about shutting down
    """
    await server.start(listening)
    try:
        if await _before_signal(signals, open_model()):
            ready()
            await signals.first.wait()
        await _drain(server, service, signals, say)
    finally:
        await server.close()


async def _before_signal(signals: StopSignals, work: Awaitable[None]) -> bool:
    """Run `work`, but cancel it at the first signal. Returns whether it was completed. Raises its errors."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(signals.first.wait())
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


async def _drain(server: HttpServer, service: Service, signals: StopSignals, say: Callable[[str], None]) -> None:
    """Let the running requests finish, until the time is up or there is a second signal."""
    service.drain()
    server.stop_listening()
    seconds = service.options.drain_s
    if service.running:
        count = f"{service.running} request{'s' if service.running > 1 else ''}"
        say(f"stopping: waiting up to {seconds:g} s for {count}; press Ctrl-C again to stop at once")
    finished = asyncio.create_task(server.finished())
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({finished, second}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    service.end_all()
    with suppress(TimeoutError):
        async with asyncio.timeout(0 if signals.second.is_set() else _LAST_WORDS_S):
            await finished
