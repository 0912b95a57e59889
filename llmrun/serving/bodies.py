"""Reads the JSON bodies of requests, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from llmrun.base.machine.memory import return_freed_memory
from llmrun.serving.exchanges import ClientGone
from llmrun.serving.options import Limits
from llmrun.serving.protocol.errors import parse_json
from llmrun.serving.refusals import SERVER, Refused

_KEY = "llmrun.body"
LARGE = 64 << 10  # bytes; parsing less takes about a millisecond, and starting a thread is not worth it

Result = TypeVar("Result")


class Bodies:
    """Reads bodies, and limits how much memory all of them take together.

    held  the size of all bodies that are being received, parsed or forwarded, in bytes
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    async def read_json(self, scope: Scope, receive: Receive) -> tuple[dict[str, Any], bool]:
        """Return the JSON object in the body, and whether it is large, so that it should be processed in a thread.

        A body that has been read is returned again.

        Raises Refused for a body that is too large, too slow, compressed or not declared as JSON, the errors of
        `parse_json`, and ClientGone.
        """
        if _KEY not in scope:
            scope[_KEY] = await self._read_json(Headers(scope=scope), receive)
        body, large = scope[_KEY]
        return body, large

    async def _read_json(self, headers: Headers, receive: Receive) -> tuple[dict[str, Any], bool]:
        _check_declared(headers, self._limits.body_bytes)
        with self.holding() as hold:
            try:
                async with asyncio.timeout(self._limits.body_s):
                    body = await self._read(receive, hold)
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
            large = len(body) > LARGE
            return await off_the_loop(large, lambda: parse_json(body)), large

    async def _read(self, receive: Receive, hold: Callable[[int], None]) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if len(body) + len(part) > self._limits.body_bytes:
                raise _too_large(self._limits.body_bytes)
            hold(len(part))
            body += part
            if not message.get("more_body", False):
                return bytes(body)

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes as held until the block ends.

        Bodies that are not large are never refused. Otherwise, a few clients that stall in the middle of large bodies
        could shut out everyone else. The limit of connections bounds their memory.
        """
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            if held + count > LARGE and self.held + count > self._limits.bodies_bytes:
                raise Refused(
                    503,
                    "the server is receiving too many large requests; try again in a moment",
                    kind=SERVER,
                    code="server_overloaded",
                    headers={"retry-after": "1"},
                )
            held += count
            self.held += count

        try:
            yield hold
        finally:
            self.held -= held


async def off_the_loop(large: bool, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread if its input is large, so that other requests go on meanwhile."""
    return await asyncio.to_thread(_run_large, work) if large else work()


def _run_large(work: Callable[[], Result]) -> Result:
    """Run `work`, then return freed memory to the operating system. Otherwise, every thread would keep some."""
    try:
        return work()
    finally:
        return_freed_memory()


def _check_declared(headers: Headers, most: int) -> None:
    """Check what the headers say about the body.

    Only JSON is accepted. Browsers let any page send forms and plain text to any server, but they ask the server before
    they send JSON. The gate's check of the Origin header already refuses such pages; this is a second line of defense.
    curl declares every body as a form, also in the examples of Ollama's documentation. Pages cannot pretend to be curl
    without asking first.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    is_curl = kind == "application/x-www-form-urlencoded" and headers.get("user-agent", "").startswith("curl/")
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")) and not is_curl:
        raise Refused(415, "the body must be JSON: send the header Content-Type: application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refused(415, "compressed bodies are not supported: send the body without Content-Encoding")
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy that believes the length would see other requests than this server does (RFC 9112, 6.1).
        words = "the headers Content-Length and Transfer-Encoding contradict each other"
        raise Refused(400, words, headers={"connection": "close"})
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)


def _too_large(most: int) -> Refused:
    return Refused(413, f"the body is larger than {most:,} bytes", code="request_too_large")
