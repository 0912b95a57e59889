"""Starts the process that talks to a Ray cluster, and exchanges messages with it (see ray_driver.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

from llmrun.base import child_processes
from llmrun.base.errors import NetworkError
from llmrun.engine.isolation.frames import HEADER_BYTES, decoded, encoded, frame_length, framed, read_frame
from llmrun.jobs.batching.workers.base import WorkerLost
from llmrun.jobs.batching.workers.ray_address import host_of
from llmrun.jobs.batching.workers.ray_messages import GONE, LOST, NEWS, value_of

CONNECT_S: Final = 60.0
_BUFFER_BYTES: Final = 1 << 20
_PING_EACH_S: Final = 10.0
_SILENCE_S: Final = 60.0
_EXIT_S: Final = 10.0
_PROBE_S: Final = 10.0
_REFUSED: Final = b"InvalidAuthToken"  # in what Ray prints while it tries again, for minutes
_NODES_HINT: Final = "this machine must be a node of the cluster, too: `ray start --address={address}`"


class RayProcess:
    """A process that is connected to a cluster.

    nodes  the cluster's nodes when it was connected, as dictionaries with "id", "host", "cpus" and "gpus"
    """

    def __init__(self, address: str, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.nodes: Sequence[Mapping[str, Any]] = ()
        self._address = address
        self._process = process
        self._connection = connection
        self._calls: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._listeners: dict[str, Callable[..., None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = ""  # the reason why there are no more answers
        self._is_refused = False
        threading.Thread(target=self._drain, args=(process.stderr,), daemon=True).start()

    @classmethod
    def connected(cls, address: str, *, connect_s: float = CONNECT_S) -> RayProcess:
        """Start a process that is connected to the cluster at HOST:PORT. Blocks. Raises NetworkError."""
        _probe(address)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                child_processes.command("jobs.batching.workers.ray_driver"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
                cwd="/",  # Ray adds this folder to the module search path of all nodes
                env=_environment(),
            )
        new = cls(address, process, ours)
        try:
            new._take_nodes(connect_s)
        except BaseException:
            new.kill()
            raise
        return new

    @property
    def is_alive(self) -> bool:
        """Whether the process answers calls."""
        return not self._ended

    async def attach(self) -> None:
        """Begin to exchange messages on this event loop, which the methods below need. Idempotent."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_BUFFER_BYTES)
            self._tasks = [asyncio.create_task(self._receive(reader)), asyncio.create_task(self._watch())]

    def listen(self, name: str, news: Callable[..., None]) -> None:
        """Call `news` with the news of a worker."""
        self._listeners[name] = news

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method, and return its value. Raises WorkerLost if there can be no answer, and the method's errors."""
        if self._ended or self._writer is None:
            raise WorkerLost(self._ended or f"ray:{self._address}: closed")
        call = next(self._ids)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(framed(encoded([call, method, arguments])))
            kind, value = await future
        finally:
            del self._calls[call]
        return value_of(kind, value)

    async def close(self) -> None:
        """End the process, and all calls with WorkerLost. Idempotent."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _EXIT_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once, from any thread. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _take_nodes(self, connect_s: float) -> None:
        self._connection.settimeout(connect_s)
        self._connection.sendall(framed(encoded({"address": self._address})))
        try:
            with self._connection.makefile("rb") as stream:
                frame = read_frame(stream)
        except TimeoutError:
            hint = _NODES_HINT.format(address=self._address)
            raise NetworkError(f"ray:{self._address}: no connection within {connect_s:g} s", hint=hint) from None
        except ConnectionError:
            frame = None
        if frame is None and self._is_refused:
            hint = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
            raise NetworkError(f"ray:{self._address}: the cluster refuses the token", hint=hint)
        if frame is None:
            ending = child_processes.ending(self._process.wait(_EXIT_S))
            raise NetworkError(f"ray:{self._address}: Ray's process ended: {ending}")
        _, kind, value = decoded(frame)
        self.nodes = value_of(kind, value)
        self._connection.settimeout(None)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                self._take(*decoded(await reader.readexactly(frame_length(header))))
        self._end(f"ray:{self._address}: Ray's process ended")

    def _take(self, call: int, kind: str, value: Any) -> None:
        if kind == NEWS:
            name, *news = value
            if name in self._listeners:
                self._listeners[name](*news)
        elif kind == GONE:
            self._end(str(value))
        elif call in self._calls and not self._calls[call].done():
            self._calls[call].set_result((kind, value))

    async def _watch(self) -> None:
        """Kill the process when it does not answer."""
        while True:
            await asyncio.sleep(_PING_EACH_S)
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self.call("ping")
            except TimeoutError:
                return self._end(f"ray:{self._address}: Ray's process does not answer")
            except WorkerLost:
                return None

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = reason
        for future in self._calls.values():
            if not future.done():
                future.set_result((LOST, reason))

    def _drain(self, stream: IO[bytes]) -> None:
        """Read what Ray prints, and kill the process if the cluster refuses the token."""
        with stream:
            for line in stream:
                if _REFUSED in line and not self.nodes:
                    self._is_refused = True
                    self._process.kill()


def _probe(address: str) -> None:
    """Raise NetworkError if nobody listens at an address, because Ray would try for two minutes."""
    port = int(address.rpartition(":")[2])
    try:
        socket.create_connection((host_of(address), port), timeout=_PROBE_S).close()
    except OSError as error:
        raise NetworkError(
            f"ray:{address}: cannot be reached: {error.strerror or error}",
            hint="check the address, and that the head is running: `ray status`",
        ) from error


def _environment() -> dict[str, str]:
    environment = child_processes.environment()
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # it would run `uv run` on all nodes
    return {name: value for name, value in environment.items() if name not in ("RAY_ADDRESS", "RAY_RUNTIME_ENV_HOOK")}
