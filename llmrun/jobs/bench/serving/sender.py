"""Sends requests to a server, each on a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

from llmrun import __version__
from llmrun.base.errors import NetworkError
from llmrun.engine.remote.client import tls_settings
from llmrun.engine.remote.connection import CONNECT_S
from llmrun.jobs.bench.serving.exchange import Exchange, ExchangeProtocol, Leave

if TYPE_CHECKING:
    from llmrun.engine.remote.url import Endpoint

SILENCE_S = 600.0  # A request fails if nothing arrives for this long. A full queue can take minutes.
_MOST_BYTES = 64 << 20
_STAY = Leave()


class Sender:
    """Sends requests to one server. Connections are direct: proxies from the environment are not used."""

    def __init__(self, endpoint: Endpoint, key: str | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint.base)
        is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if is_tls else 80)
        self._root, self._prefix = parts.path.removesuffix("/v1"), parts.path
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

    async def post(self, path: str, content: bytes, leave: Leave = _STAY) -> Exchange:
        """Send a JSON request to a path below the endpoint, such as "/completions". Never raises for a failure."""
        headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
        return await self._exchange("POST", self._prefix + path, headers, content, leave)

    async def get(self, path: str) -> Exchange:
        """Get a path of the server's root, such as "/metrics". Never raises for a failure."""
        return await self._exchange("GET", self._root + path, [], b"", _STAY)

    async def _exchange(
        self, method: str, target: str, headers: list[tuple[str, str]], content: bytes, leave: Leave
    ) -> Exchange:
        exchange = Exchange(time.perf_counter())
        request = h11.Request(method=method, target=target, headers=[*self._headers, *headers])
        protocol = ExchangeProtocol(exchange, request, content, leave, _MOST_BYTES)
        loop = asyncio.get_running_loop()
        leaving = leave.seconds is not None and loop.call_later(leave.seconds, lambda: protocol.end(left=True))
        try:
            await self._connected(protocol)
            await self._ended(protocol)
        finally:
            protocol.end("cancelled")
            if leaving:
                leaving.cancel()
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
    """Allow as many open connections as the system permits. The default of macOS is 256."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
