"""Runs a server until a signal: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from socket import socket
from typing import TYPE_CHECKING, Any

from llmrun.serving.http_server import HttpServer
from llmrun.serving.models.registry import Models
from llmrun.serving.processes.stop_signals import StopSignals

if TYPE_CHECKING:
    from llmrun.serving.upstreams.front import Upstreams

_LAST_WORDS_S = 2.0  # time for the clients to receive the last events before their connections are aborted


async def run_server(
    server: HttpServer,
    models: Models,
    listening: socket,
    *,
    drain_s: float,
    ready: Callable[[], None],
    say: Callable[[str], None],
    signals: StopSignals,
    upstreams: Upstreams | None = None,
) -> None:
    """Serve until a signal arrives. While the first models are being opened, requests get errors that say so.

    Raises the error of a model that cannot be opened.

    drain_s  how long running requests may continue after the signal, in seconds
    ready    called when the models are open
    say      called with a line about shutting down
    """
    await server.start(listening)
    try:
        if await _before(signals.first, _both(models.start(), upstreams.start() if upstreams else None)):
            ready()
            await signals.first.wait()
            server.stop_listening()
            if models.open_requests + (upstreams.open_requests if upstreams else 0):
                say(f"stopping: running answers get up to {drain_s:g} s; press Ctrl-C again to stop at once")
            await _before(signals.second, _both(models.drain(drain_s), upstreams.drain(drain_s) if upstreams else None))
    finally:
        await _both(models.close(), upstreams.close() if upstreams else None)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await server.finished()
        await server.close()


async def _both(*works: Awaitable[None] | None) -> None:
    """Run several coroutines at the same time. Raises the first error."""
    await asyncio.gather(*(work for work in works if work is not None))


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
