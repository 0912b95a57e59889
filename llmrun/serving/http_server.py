"""Runs the HTTP server until a signal arrives, with limits against slow and hostile clients.

uvicorn does not limit the time for a header, the time that a client leaves data unread, or the time that a client
keeps sending a body after the response. `Connection.check` is called about once per second and enforces all three
limits without a timer for each connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from socket import AF_UNSPEC, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, gaierror, getaddrinfo, socket
from typing import TYPE_CHECKING, Any, cast

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from llmrun.base.errors import UsageError
from llmrun.base.machine.memory import return_freed_memory
from llmrun.serving.models.registry import Models
from llmrun.serving.options import Limits
from llmrun.serving.processes.stop_signals import StopSignals
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.wire import OPENAI, json_bytes
from llmrun.serving.refusals import INVALID, SERVER, Refused, error_response

if TYPE_CHECKING:
    from llmrun.serving.upstreams.front import Upstreams

_SPARE = 64  # connections beyond the limit that still receive the error "too many connections"
_HEADER_END = re.compile(rb"\n\r?\n")
_HEADER_TOO_LARGE = "the header is too large"
_PROGRESS = 1024  # bytes that a client must read between two checks; reading one byte at a time does not count


class Connection(H11Protocol):
    """An HTTP connection with limits on the client's behavior."""

    def __init__(self, limits: Limits, config: Config, state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, state, {}, loop)
        self._limits = limits
        self._header_since: float | None = loop.time()  # when the client began to send a header
        self._linger_since: float | None = None  # when the server began to discard the client's data
        self._discarded = 0  # the number of discarded bytes
        self._refused = False  # True if the client received an error and is expected to close the connection
        self._unread = 0  # bytes that the client had not read at the last check
        self._unread_since = loop.time()
        self._early = b""  # data of the next request that arrived before the end of the response

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
        data, self._early = self._early + data, b""
        if self._is_early(data):
            self._early = data
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
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def check(self) -> None:
        """Close the connection if the client has exceeded a limit."""
        now, limits = self.loop.time(), self._limits
        lingers = self._linger_since is not None and now - self._linger_since > limits.linger_s
        if lingers or self._takes_nothing(now):
            self.transport.abort()
        elif self._header_since is not None and now - self._header_since > limits.header_s:
            self._refuse(408, f"no complete request within {limits.header_s:g} s")

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not valid HTTP. `handle_events` calls this method while handling an error of h11."""
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
        """True if no response is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _has_huge_header(self, data: bytes) -> bool:
        """Return whether `data` begins with a header that is too large.

        h11 does not limit the size of headers that arrive in one piece.
        """
        limit = self._limits.header_bytes
        return len(data) > limit and not _HEADER_END.search(data, 0, limit)

    def _is_early(self, data: bytes) -> bool:
        """Return whether `data` belongs to the next request, which must wait for the end of the current response.

        If uvicorn received this data, it would stop reading, and would not notice that the client disconnects.
        """
        fits = len(data) <= self._limits.header_bytes
        return fits and not self.is_idle and self.conn.their_state is h11.DONE

    def _takes_nothing(self, now: float) -> bool:
        """Return whether the client has left data unread for too long, even while the connection is being closed."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread <= self._unread - _PROGRESS:
            self._unread_since = now
        self._unread = unread
        return now - self._unread_since > self._limits.unread_s

    def _refuse(self, status: int, words: str) -> None:
        """Send an error without running the application, and close the connection.

        Data that the client still sends is discarded for a moment. Closing the connection immediately would reset the
        connection, and the client might never read the error.
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


_BACKLOG = 512
_CHECK_S = 1.0
_TRIM_S = 30.0
_POLL_S = 0.02
_OTHER_FILES = 256  # open files that are not connections
_MOST_CHECKS = 10  # the number of checks during the shortest limit; tests use short limits


class HttpServer:
    """The connections of one application.

    uvicorn's own `Server` is not used, because that class handles signals, polls ten times per second, and does not
    limit the time of a TLS handshake.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tls: ssl.SSLContext | None = None) -> None:
        logging.getLogger("uvicorn").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn").propagate = False
        self._limits, self._tls = limits, tls
        self._state = ServerState()
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            workers=1,
            timeout_keep_alive=limits.keep_alive_s,
            h11_max_incomplete_event_size=limits.header_bytes,
        )
        self._server: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None
        self._trimmed_after, self._trimmed_at = 0, time.monotonic()  # the request count at the last trim, and its time

    async def start(self, listening: socket) -> None:
        """Accept connections on a bound socket. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._set_date()
        self._server = await loop.create_server(
            lambda: Connection(self._limits, self._config, self._state, loop),
            sock=listening,
            ssl=self._tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self._limits.header_s if self._tls else None,
            ssl_shutdown_timeout=self._limits.linger_s if self._tls else None,
        )
        self._checking = asyncio.create_task(self._check())

    def stop_listening(self) -> None:
        """Refuse new connections, and close each open connection after its response in progress.

        Idle connections stay open until `close`, so that health checks can still read the server's state.
        """
        if self._server is not None:
            self._server.close()
        for connection in self._connections():
            connection.close_after_response()

    async def finished(self) -> None:
        """Wait until no response is in progress."""
        while any(not connection.is_idle for connection in self._connections()):
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close idle connections, abort all other connections, and wait until their requests have ended."""
        self.stop_listening()
        for connection in self._connections():
            if connection.is_idle:
                connection.transport.close()
            else:
                connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if self._checking is not None:
            self._checking.cancel()
            tasks.append(self._checking)
        if tasks:
            await asyncio.wait(tasks)

    async def _check(self) -> None:
        limits, loop = self._limits, asyncio.get_running_loop()
        shortest = min(limits.header_s, limits.unread_s, limits.linger_s)
        while True:
            await asyncio.sleep(min(_CHECK_S, shortest / _MOST_CHECKS))
            self._set_date()
            self._return_memory()
            for connection in self._connections():
                try:
                    connection.check()
                except Exception as error:  # noqa: BLE001  a bug with one connection must not disable the limits of all connections
                    connection.transport.abort()
                    loop.call_exception_handler({"message": "cannot check a connection", "exception": error})

    def _return_memory(self) -> None:
        """Return freed memory to the system when no request is in progress, or every `_TRIM_S` seconds under load.

        Without this method, the process kept 300 MB of freed memory after half an hour of hostile requests.
        """
        n_requests, now = self._state.total_requests, time.monotonic()
        if n_requests == self._trimmed_after:
            return
        if now > self._trimmed_at + _TRIM_S or all(connection.is_idle for connection in self._connections()):
            return_freed_memory()
            self._trimmed_after, self._trimmed_at = n_requests, now

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode("ascii"))]

    def _connections(self) -> list[Connection]:
        return cast("list[Connection]", list(self._state.connections))


def bound_socket(host: str, port: int) -> socket:
    """Return a socket that is bound to an address but does not listen yet. Port 0 picks a free port.

    Raises UsageError if the address is not valid or in use.
    """
    try:
        found = getaddrinfo(host, port, AF_UNSPEC, SOCK_STREAM)
        family, kind, protocol, _, address = sorted(found, key=lambda one: one[0])[0]  # IPv4 first
    except (gaierror, UnicodeError) as error:
        raise UsageError(f"--host: {host}: {getattr(error, 'strerror', None) or error}") from None
    made = socket(family, kind, protocol)
    try:
        made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # allows binding the address before old connections expire
        made.bind(address)
    except OSError as error:
        made.close()
        raise _not_bound(host, port, error) from None
    return made


def allow_open_files(connections: int) -> None:
    """Raise this process's limit on open files to fit the given number of connections, if the system permits."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = connections + _OTHER_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _not_bound(host: str, port: int, error: OSError) -> UsageError:
    import errno

    if error.errno == errno.EADDRINUSE:
        return UsageError(f"--port: {port} is in use on {host}", hint="choose another port, or 0 for a free port")
    if error.errno == errno.EACCES:
        return UsageError(f"--port: {port}: needs administrator rights", hint="choose a port of 1024 or above")
    return UsageError(f"--host: cannot listen on {host}, port {port}: {error.strerror}")


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings for a certificate chain and its private key, both in PEM format. Raises UsageError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise UsageError(f"{flag}: {path}: {error.strerror}") from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        words = getattr(error, "reason", None) or str(error)
        raise UsageError(
            f"--tls-cert: {certificate} and {key}: not a valid certificate with its private key: {words}"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and llmrun does not ask for passwords")


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
    """Serve until a signal arrives. While the first models are being opened, requests receive errors.

    Raises the error of a model that cannot be opened.

    drain_s  the time that running requests may continue after the signal, in seconds
    ready    called when the models are open
    say      called with a message about the shutdown
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
    """Run several coroutines at the same time. Raises the error of the first coroutine that fails."""
    await asyncio.gather(*(work for work in works if work is not None))


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, cancel it when `stop` is set, and return whether it was completed. Raises the errors of `work`."""
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
