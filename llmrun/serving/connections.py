"""One connection: uvicorn's HTTP protocol with the limits against slow and hostile clients that it does not have.

uvicorn limits neither the time for a header, nor the time for which a client leaves data unread, nor how long a client
goes on sending a body after its response. `check` is called about once per second and enforces all three, which needs
no timers for healthy connections.
"""

from __future__ import annotations

import asyncio
import re
import sys
from http import HTTPStatus

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from llmrun.serving.options import Limits
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import OPENAI, json_bytes
from llmrun.serving.refusals import INVALID, SERVER, Refused, error_response

_SPARE = 64  # connections beyond the limit that still get an answer, which says that there are too many
_HEADER_END = re.compile(rb"\n\r?\n")
_HEADER_TOO_LARGE = "the header is too large"
_PROGRESS = 1024  # bytes that a client must take between two checks, so that one byte at a time does not count


class Connection(H11Protocol):
    """A connection with limits."""

    def __init__(self, limits: Limits, config: Config, state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, state, {}, loop)
        self._limits = limits
        self._header_since: float | None = loop.time()  # since when the client has been sending a header
        self._linger_since: float | None = None  # since when what the client sends is being discarded
        self._discarded = 0  # bytes
        self._refused = False  # whether the client got an error and is expected to close the connection
        self._unread = 0  # bytes that the client had not taken at the last check
        self._unread_since = loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections + _SPARE:
            transport.abort()
        elif len(self.connections) > self._limits.connections:
            self.app = _too_many_connections

    def data_received(self, data: bytes) -> None:
        request = self.cycle
        if self._linger_since is not None:
            self._discarded += len(data)
            if self._discarded > self._limits.body_bytes:
                self.transport.abort()
        if self._refused or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._has_huge_header(data):
            self._refuse(431, _HEADER_TOO_LARGE)
            return
        super().data_received(data)
        if self.cycle is not request:
            self._header_since = self._linger_since = None
            self._discarded = 0
        elif self.is_idle and self._header_since is None:
            self._header_since = self.loop.time()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY or self.app is _too_many_connections:
            self._linger_since = self.loop.time()
        super().on_response_complete()

    def check(self) -> None:
        """Close the connection if the client has exceeded a limit."""
        now, limits = self.loop.time(), self._limits
        lingers = self._linger_since is not None and now - self._linger_since > limits.linger_s
        if lingers or self._takes_nothing(now):
            self.transport.abort()
        elif self._header_since is not None and now - self._header_since > limits.header_s:
            self._refuse(408, f"no complete request within {limits.header_s:g} s")

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not valid HTTP. `handle_events` calls this while it handles h11's error."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        words = _HEADER_TOO_LARGE if status == 431 else "not a valid HTTP request"
        self._refuse(status if status in (400, 431, 501) else 400, words)

    def close_after_response(self) -> None:
        """Close the connection after the response in progress, if there is one."""
        if not self.is_idle:
            self.cycle.keep_alive = False

    @property
    def is_idle(self) -> bool:
        """Whether no response is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _has_huge_header(self, data: bytes) -> bool:
        """Return whether `data` begins with a header that is too large.

        h11 does not limit headers that arrive in one piece.
        """
        limit = self._limits.header_bytes
        return len(data) > limit and not _HEADER_END.search(data, 0, limit)

    def _takes_nothing(self, now: float) -> bool:
        """Return whether the client has left data unread for too long. This also ends a close that waits for it."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread <= self._unread - _PROGRESS:
            self._unread_since = now
        self._unread = unread
        return now - self._unread_since > self._limits.unread_s

    def _refuse(self, status: int, words: str) -> None:
        """Send an error without running the application, and end the connection.

        What the client still sends is discarded for a moment. Closing the connection at once would reset it, and the
        client might never read the error.
        """
        self._header_since, self._linger_since, self._refused = None, self.loop.time(), True
        body = json_bytes(OPENAI.error(ApiError(status, words, INVALID)))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(status).phrase.encode("ascii")
        try:
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:  # TLS
                self.transport.close()
        except (h11.LocalProtocolError, OSError):  # a response has begun, or the client has left
            self.transport.abort()


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    error = Refused(
        503,
        "the server has too many open connections",
        kind=SERVER,
        code="too_many_connections",
        headers={"retry-after": "1"},
    )
    await error_response(error, OPENAI)(scope, receive, send)
