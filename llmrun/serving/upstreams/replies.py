"""The response to the client of a forwarded request, with comments while the upstream is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Send

from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import WireFormat

# The headers of an upstream's response that are passed on. All others may be about its connection or its own keys.
_PASSED_ON: Final = (
    "content-type",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-llmrun-ignored",
    "x-llmrun-wait",
)
_OF_STREAMS: Final = {"x-accel-buffering": "no"}  # nginx would collect events before it passes them on


class Reply:
    """One response.

    started  whether its header has been sent
    begun    whether a part of the answer has been sent
    """

    def __init__(self, send: Send, wire: WireFormat, *, streamed: bool) -> None:
        """Wrap `send` of ASGI."""
        self._send, self._wire, self._streamed = send, wire, streamed
        self._lock = asyncio.Lock()  # two tasks send: the one that forwards, and the one that sends comments
        self._sent_at = asyncio.get_running_loop().time()
        self.started = False
        self.begun = False

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response with the headers of an upstream's."""
        async with self._lock:
            await self._start(status, headers, {"content-length": str(len(body))})
            await self._body(body, more=False)

    async def events(self, headers: Mapping[str, str], raw: bytes) -> None:
        """Send a part of a stream. `headers` are those of the upstream."""
        async with self._lock:
            if not self.started:
                await self._start(200, headers, _OF_STREAMS)
            self.begun = True
            await self._body(raw, more=True)

    async def end(self, error: ApiError | None = None) -> None:
        """End a stream, with an error event if there is an error."""
        async with self._lock:
            last = b"" if error is None else self._wire.frame(self._wire.error_chunk(error), "")
            await self._body(last, more=False)

    @asynccontextmanager
    async def pinging(self, ping_s: float) -> AsyncIterator[None]:
        """Send a comment whenever a stream has been silent for `ping_s` seconds, if the API has comments."""
        if not self._streamed or not self._wire.ping:
            yield
            return
        task = asyncio.create_task(self._ping(ping_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _ping(self, ping_s: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + ping_s - clock()))
            async with self._lock:
                if clock() >= self._sent_at + ping_s:
                    if not self.started:
                        await self._start(200, {"content-type": self._wire.media_type}, _OF_STREAMS)
                    await self._body(self._wire.ping, more=True)

    async def _start(self, status: int, headers: Mapping[str, str], own: Mapping[str, str]) -> None:
        self.started = True
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        fields = {"cache-control": "no-store", **passed, **own}.items()
        encoded = [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sent_at = asyncio.get_running_loop().time()
