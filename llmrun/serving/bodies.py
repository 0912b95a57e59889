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
LARGE = 64 << 10  # bytes; parsing a smaller body takes about a millisecond, so a thread would not pay off

Result = TypeVar("Result")


class Bodies:
    """Reads bodies, and limits the total memory that all bodies use.

    held  the total size of all bodies that are being received, parsed or forwarded, in bytes
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    async def read_json(self, scope: Scope, receive: Receive) -> tuple[dict[str, Any], bool]:
        """Return the JSON object in the body, and whether the body is large and should be processed in a thread.

        The result is stored, and later calls for the same request return the stored result.

        Raises Refused if the body is too large, too slow, compressed or not declared as JSON. Raises ClientGone, and
        the errors of `parse_json`.
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
        """Yield a function that adds bytes to `held`, and subtract these bytes when the block ends.

        Small bodies are never refused, so a few clients that stall in the middle of large bodies cannot shut out all
        other clients. The limit on connections bounds the memory of small bodies.
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
    """Run `work` and return its result. If `large` is set, a thread runs `work`, so that other requests continue."""
    return await asyncio.to_thread(_run_large, work) if large else work()


def _run_large(work: Callable[[], Result]) -> Result:
    """Run `work`, then return freed memory to the system, because otherwise every thread would keep some memory."""
    try:
        return work()
    finally:
        return_freed_memory()


def _check_declared(headers: Headers, most: int) -> None:
    """Check the headers that describe the body.

    Only JSON is accepted. Browsers let any page send forms and plain text to any server, but send a preflight request
    before JSON bodies. The gate's check of the Origin header already refuses other sites' pages, so this check is a
    second line of defense. curl declares every body as a form by default, even in the examples of Ollama's
    documentation. Pages cannot imitate curl without a preflight request.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    is_curl = kind == "application/x-www-form-urlencoded" and headers.get("user-agent", "").startswith("curl/")
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")) and not is_curl:
        raise Refused(415, "the body must be JSON: send the header Content-Type: application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refused(415, "compressed bodies are not supported: send the body without Content-Encoding")
    if "transfer-encoding" in headers and "content-length" in headers:
        # A proxy that relies on Content-Length would see different requests than this server (RFC 9112, 6.1).
        words = "the headers Content-Length and Transfer-Encoding contradict each other"
        raise Refused(400, words, headers={"connection": "close"})
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)


def _too_large(most: int) -> Refused:
    return Refused(413, f"the body is larger than {most:,} bytes", code="request_too_large")
