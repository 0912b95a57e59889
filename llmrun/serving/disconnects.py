"""Notices when a client leaves, so that its requests stop in any phase: in the queue, in the prompt, in the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


class Presence:
    """Watches whether the client of one request is still there, from the end of the request's body on.

    A task awaits `receive`, because the server reports a closed connection only to those who ask. This matters most for
    responses that are not streamed, which send nothing that could fail.
    """

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.create_task(_disconnected(receive))

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. Cancel it and raise ClientGone if the client leaves first."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.cancel()
        await asyncio.wait({self._left})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
