"""One HTTP request and the bytes of its response with their arrival times.

This is an asyncio protocol of our own because the client runs on the machine that it measures. For a stream of 16
clients, it takes 16 us of CPU time per event, httpx2's AsyncClient 65 us, and a thread per request with httpx2 150 us.
For the same reason, the JSON of the events is parsed only after the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass(frozen=True, slots=True)
class Leave:
    """The moment at which the client disconnects: after a number of events, or of seconds since it began to connect."""

    events: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Exchange:
    """A request that was sent. Times are from time.perf_counter.

    sent     when the client began to connect
    ended    when the response or the connection ended
    status   the HTTP status; 0 if there was no response
    headers  names in lower case
    pieces   the parts of the body with their arrival times
    problem  why the response is incomplete, such as "connection lost"; empty if it is complete
    left     whether the client disconnected as planned
    """

    sent: float
    ended: float = 0.0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    problem: str = ""
    left: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class ExchangeProtocol(asyncio.Protocol):
    """Sends a request as soon as it is connected, and records the response in `exchange`.

    done  a future that is resolved when the exchange has ended, for whatever reason
    """

    def __init__(self, exchange: Exchange, request: h11.Request, content: bytes, leave: Leave, most_bytes: int) -> None:
        self.exchange = exchange
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._content = request, content
        self._leave_after, self._most_bytes = leave.events, most_bytes
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._events = self._bytes = 0
        self.active = exchange.sent  # when something last happened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.done.done():  # The client left while it was connecting.
            transport.abort()
            return
        parts = [self._http.send(self._request)]
        if self._content:
            parts.append(self._http.send(h11.Data(data=self._content)))
        parts.append(self._http.send(h11.EndOfMessage()))
        transport.write(b"".join(part for part in parts if part))

    def data_received(self, data: bytes) -> None:
        arrived = self.active = time.perf_counter()
        if self.done.done():
            return
        try:
            self._http.receive_data(data)
            self._take_events(arrived)
        except h11.RemoteProtocolError:
            self.end("invalid HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        try:
            self._http.receive_data(b"")  # A body without a length ends here.
            self._take_events(time.perf_counter())
        except (h11.RemoteProtocolError, RuntimeError):
            pass
        self.end("connection lost")

    def end(self, problem: str = "", *, left: bool = False) -> None:
        """End the exchange and close the connection. Does nothing if the exchange has already ended."""
        if self.done.done():
            return
        self.exchange.ended = time.perf_counter()
        self.exchange.problem, self.exchange.left = problem, left
        if self._transport is not None:
            self._transport.abort()
        self.done.set_result(None)

    def _take_events(self, arrived: float) -> None:
        exchange = self.exchange
        while not self.done.done():
            event: Any = self._http.next_event()
            if isinstance(event, h11.Data):
                data = bytes(event.data)
                exchange.pieces.append((arrived, data))
                self._bytes += len(data)
                if self._bytes > self._most_bytes:
                    self.end("answer too long")
                elif self._leave_after is not None:
                    self._events += data.count(b"data:")
                    if self._events >= self._leave_after:
                        self.end(left=True)
            elif isinstance(event, h11.Response):
                exchange.status = event.status_code
                exchange.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.EndOfMessage):
                self.end()
            elif not isinstance(event, h11.InformationalResponse):
                return  # NEED_DATA, PAUSED or ConnectionClosed
