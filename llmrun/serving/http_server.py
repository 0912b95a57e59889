"""Accepts connections on a socket, and checks them about once per second."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import time
from email.utils import formatdate
from pathlib import Path
from socket import AF_UNSPEC, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, gaierror, getaddrinfo, socket
from typing import cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from llmrun.base.errors import UsageError
from llmrun.base.machine.freed_memory import return_freed_memory
from llmrun.serving.connections import Connection
from llmrun.serving.options import Limits

_BACKLOG = 512
_CHECK_S = 1.0
_TRIM_S = 30.0
_POLL_S = 0.02
_OTHER_FILES = 256  # files besides connections
_MOST_CHECKS = 10  # times per shortest limit, so that tests can use short limits


class HttpServer:
    """The connections of one application.

    uvicorn's own `Server` is not used, because it handles signals, polls ten times per second, and does not limit the
    time of a TLS handshake.
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
        self._trimmed_after, self._trimmed_at = 0, time.monotonic()  # the number of requests, and the time

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
        """Refuse new connections, and close each open one after its response in progress.

        Idle connections stay open until `close`, so that health checks can see what is going on.
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
        """Close idle connections, abort the others, and wait until their requests have ended."""
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
                except Exception as error:  # noqa: BLE001  a bug with one connection must not end the limits of all
                    connection.transport.abort()
                    loop.call_exception_handler({"message": "cannot check a connection", "exception": error})

    def _return_memory(self) -> None:
        """Return freed memory to the system after requests: at once if no other is in progress, or now and then.

        Without this, the process kept 300 MB after half an hour of hostile requests.
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
    """Return a socket that is bound to an address, without listening yet. Port 0 picks a free port.

    Raises UsageError if the address is not valid or in use.
    """
    try:
        found = getaddrinfo(host, port, AF_UNSPEC, SOCK_STREAM)
        family, kind, protocol, _, address = sorted(found, key=lambda one: one[0])[0]  # IPv4 first
    except (gaierror, UnicodeError) as error:
        raise UsageError(f"--host: {host}: {getattr(error, 'strerror', None) or error}") from None
    made = socket(family, kind, protocol)
    try:
        made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # a restarted server need not wait for old connections to expire
        made.bind(address)
    except OSError as error:
        made.close()
        raise _not_bound(host, port, error) from None
    return made


def allow_open_files(connections: int) -> None:
    """Let this process open enough files for so many connections, if the system permits it."""
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
        return UsageError(f"--port: {port} is in use on {host}", hint="choose another one, or --port 0 for a free one")
    if error.errno == errno.EACCES:
        return UsageError(f"--port: {port}: needs administrator rights", hint="choose a port of 1024 or above")
    return UsageError(f"--host: cannot listen on {host}, port {port}: {error.strerror}")


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings for a certificate (with its chain) and its private key, both PEM. Raises UsageError."""
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
