"""Runs a server until a signal: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from socket import socket
from typing import Any, Protocol

from llmrun.engine_process.served_model import ServedModel
from llmrun.engine_process.stop_signals import StopSignals
from llmrun.serving.http_server import HttpServer

_LAST_WORDS_S = 2.0  # time for the clients to receive the last events before their connections are aborted


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
