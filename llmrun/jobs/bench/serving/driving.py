"""Sends requests in an open loop, each at a given time, or in a closed loop, a fixed number at a time.

In an open loop, the arrival times do not depend on the server. Each request uses a separate connection, and the bytes
of the response are stored with their arrival times.

The client is a custom asyncio protocol, because the client runs on the machine that it measures. For a stream of 16
clients, this protocol takes 16 us of CPU time per event, httpx2's AsyncClient 65 us, and a thread per request with
httpx2 150 us. The JSON of the events is parsed only after the run, because parsing would also take CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import numpy as np

from llmrun import __version__
from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import CONNECT_S, tls_settings

if TYPE_CHECKING:
    from llmrun.engine.remote.request import Endpoint

MOST_REQUESTS = 1_000_000
_BLOCK = 1024


def arrival_times(
    rate: float, seed: int, *, requests: int | None = None, duration: float | None = None, burstiness: float = 1.0
) -> list[float]:
    """Return the times in seconds at which requests arrive, in increasing order.

    The gaps between arrivals follow a gamma distribution with the shape `burstiness`, as in `vllm bench serve`: 1 is a
    Poisson process, lower values are burstier, and higher values are more regular.

    rate      requests per second, on average
    requests  the number of requests
    duration  the time in seconds during which requests arrive; the limit that is reached first counts

    Raises ValueError unless the rate and the burstiness are positive and finite and a limit is given.
    """
    if not (0 < rate < math.inf and 0 < burstiness < math.inf) or requests is duration is None:
        raise ValueError(f"arrivals: rate {rate:g}, burstiness {burstiness:g}: positive numbers and a limit are needed")
    most = MOST_REQUESTS if requests is None else min(requests, MOST_REQUESTS)
    until = math.inf if duration is None else duration
    random, times, now = np.random.default_rng(seed), list[float](), 0.0
    while True:
        for gap in random.gamma(burstiness, 1 / (rate * burstiness), _BLOCK).tolist():
            now += gap
            if len(times) >= most or now >= until:
                return times
            times.append(now)


@dataclass(slots=True)
class Exchange:
    """A sent request with its response. Times are from time.perf_counter.

    due      the time when the request should have been sent
    sent     the time when the client began to connect
    ended    the time when the response or the connection ended
    status   the HTTP status; 0 without a response
    headers  names in lower case
    pieces   the parts of the body with their arrival times
    problem  why the response is incomplete, such as "connection lost"; empty if the response is complete
    """

    due: float
    sent: float
    ended: float = 0.0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    problem: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class ExchangeProtocol(asyncio.Protocol):
    """Sends a request once the connection is open, and records the response in `exchange`.

    done  a future that is resolved when the exchange has ended, for any reason
    """

    def __init__(self, exchange: Exchange, request: h11.Request, content: bytes, most_bytes: int) -> None:
        self.exchange = exchange
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._content = request, content
        self._most_bytes = most_bytes
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._bytes = 0
        self.active = exchange.sent  # the time of the last activity

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.done.done():  # The exchange was cancelled while it was connecting.
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

    def end(self, problem: str = "") -> None:
        """End the exchange and close the connection. Repeated calls have no effect."""
        if self.done.done():
            return
        self.exchange.ended = time.perf_counter()
        self.exchange.problem = problem
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
            elif isinstance(event, h11.Response):
                exchange.status = event.status_code
                exchange.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.EndOfMessage):
                self.end()
            elif not isinstance(event, h11.InformationalResponse):
                return  # NEED_DATA, PAUSED or ConnectionClosed


SILENCE_S = 600.0  # A request fails if no data arrives for this long. Waiting in a full queue can take minutes.
_MOST_BYTES = 64 << 20


class Sender:
    """Sends requests to one server. Connections are direct: proxies from the environment are not used."""

    def __init__(self, endpoint: Endpoint, key: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint.base)
        is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if is_tls else 80)
        self._prefix = parts.path
        self._tls = tls_settings(endpoint) if is_tls else None
        self._address = ""
        self._silence_s = silence_s
        self._headers = [
            ("host", endpoint.host),
            ("user-agent", f"llmrun/{__version__}"),
            ("accept", "text/event-stream, application/json"),
            ("accept-encoding", "identity"),
            ("connection", "close"),
            *([("authorization", f"Bearer {key}")] if key else []),
        ]

    async def connect(self) -> None:
        """Find the server's address, so that requests do not wait for DNS. Raises NetworkError."""
        raise_file_limit()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, _ = await loop.create_connection(asyncio.Protocol, self._host, self._port)
        except OSError as error:
            words = getattr(error, "strerror", None) or type(error).__name__
            raise NetworkError(f"unreachable: {self._endpoint.host}: {words}") from error
        self._address = str(transport.get_extra_info("peername")[0])
        transport.close()

    async def post(self, path: str, content: bytes, due: float) -> Exchange:
        """Send a JSON request to a path below the endpoint, such as "/completions". Failures raise no error."""
        exchange = Exchange(due, time.perf_counter())
        headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
        request = h11.Request(method="POST", target=self._prefix + path, headers=[*self._headers, *headers])
        protocol = ExchangeProtocol(exchange, request, content, _MOST_BYTES)
        try:
            await self._connected(protocol)
            await self._ended(protocol)
        finally:
            protocol.end("cancelled")
        return exchange

    async def _connected(self, protocol: ExchangeProtocol) -> None:
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(
                    lambda: protocol, self._address, self._port, ssl=self._tls, server_hostname=name
                )
        except OSError:  # TimeoutError is an OSError.
            protocol.end("unreachable")

    async def _ended(self, protocol: ExchangeProtocol) -> None:
        while not protocol.done.done():
            quiet = protocol.active + self._silence_s - time.perf_counter()
            if quiet <= 0:
                protocol.end("timed out")
            await asyncio.wait((protocol.done,), timeout=max(quiet, 0))


def raise_file_limit() -> None:
    """Allow as many open connections as the system permits. The default limit on macOS is 256."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(slots=True)
class Driver:
    """Sends requests to a path, and collects completed requests, even if the run is interrupted."""

    sender: Sender
    path: str
    ended: list[Exchange] = field(default_factory=list)
    running: int = 0

    async def open_loop(self, contents: Iterable[bytes], times: Sequence[float]) -> None:
        """Send each request at its time in seconds from now, and wait until all requests have ended."""
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for content, at in zip(contents, times, strict=False):  # The iterator creates requests in advance.
                due = started + at
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._send(content, due))

    async def closed_loop(self, contents: Iterator[bytes], concurrency: int, *, duration: float = math.inf) -> None:
        """Keep `concurrency` requests running until no requests are left, or for `duration` seconds.

        The requests that are still running after `duration` seconds are completed.
        """
        until = time.perf_counter() + duration

        async def client() -> None:
            while time.perf_counter() < until and (content := next(contents, None)) is not None:
                await self._send(content, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def _send(self, content: bytes, due: float) -> None:
        self.running += 1
        try:
            self.ended.append(await self.sender.post(self.path, content, due))
        finally:
            self.running -= 1
