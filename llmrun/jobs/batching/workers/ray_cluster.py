"""Workers on the nodes of a Ray cluster, and the process that talks to the cluster (see ray_driver.py)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from msgspec import to_builtins

from llmrun.base.errors import LlmrunError, NetworkError, UsageError
from llmrun.base.processes import commands
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import decoded, encoded
from llmrun.engine.child.messages import Open
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.upkeep.model_copies import OriginalFile, originals
from llmrun.jobs.batching.workers import base
from llmrun.jobs.batching.workers.base import GONE, LONGEST, LOST, NEWS, RefusedWorker, Reply, WorkerLost, value_of
from llmrun.jobs.batching.workers.ray_address import check_token, find_address, host_of, is_loopback

CONNECT_S: Final = 60.0
_STDERR_BYTES: Final = 1 << 16
_LOOK_S: Final = 0.05  # seconds between checks whether the cluster has refused the token
_PING_EACH_S: Final = 10.0
_SILENCE_S: Final = 60.0
_EXIT_S: Final = 10.0
_PROBE_S: Final = 10.0
_REFUSED: Final = "InvalidAuthToken"  # part of the text that Ray prints while retrying for minutes


class RayProcess:
    """A process that is connected to a cluster.

    nodes  the cluster's nodes when it was connected, as dictionaries with "id", "host", "cpus" and "gpus"
    """

    def __init__(self, address: str, child: Child) -> None:
        self.nodes: Sequence[Mapping[str, Any]] = ()
        self._address = address
        self._child = child
        self._calls: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._listeners: dict[str, Callable[..., None]] = {}
        self._to_send: SimpleQueue[bytes | None] = SimpleQueue()
        self._watching: asyncio.Task[None] | None = None
        self._ended = ""  # the reason why the process can no longer answer
        threading.Thread(target=self._send_all, daemon=True).start()

    @classmethod
    def connected(cls, address: str, *, connect_s: float = CONNECT_S) -> RayProcess:
        """Start a process that connects to the cluster at HOST:PORT. Blocks until connected. Raises NetworkError."""
        _probe(address)
        child = Child(
            commands.command("jobs.batching.workers.ray_driver", address),
            purpose="the process that talks to Ray",
            environment=_environment(),
            folder=Path("/"),  # Ray adds this folder to the module search path of all nodes.
            kept_stderr=_STDERR_BYTES,
        )
        new = cls(address, child)
        try:
            new._take_nodes(connect_s)
        except BaseException:
            new.kill()
            raise
        return new

    @property
    def is_alive(self) -> bool:
        """True if the process answers calls."""
        return not self._ended

    async def attach(self) -> None:
        """Begin to exchange messages on this event loop, as the methods below require. This method is idempotent."""
        if self._watching is None:
            threading.Thread(target=self._receive_all, args=(asyncio.get_running_loop(),), daemon=True).start()
            self._watching = asyncio.create_task(self._watch())

    def listen(self, name: str, news: Callable[..., None]) -> None:
        """Register the callback `news` for the news of a worker."""
        self._listeners[name] = news

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method, and return its value. Raises WorkerLost if no answer is possible, and errors of the method."""
        if self._ended or self._watching is None:
            raise WorkerLost(self._ended or f"ray:{self._address}: closed")
        call = next(self._ids)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._to_send.put(encoded([call, method, arguments]))
            kind, value = await future
        finally:
            del self._calls[call]
        return value_of(kind, value)

    async def close(self) -> None:
        """End the process, and fail all calls with WorkerLost. This method is idempotent."""
        self._end("closed")
        if self._watching is not None:
            self._watching.cancel()
        self._to_send.put(None)
        await asyncio.to_thread(self._child.wait, _EXIT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process immediately, from any thread. This method is idempotent."""
        self._to_send.put(None)
        self._child.kill()
        self._child.wait(_EXIT_S)

    def _take_nodes(self, connect_s: float) -> None:
        frame = self._first_frame(connect_s)
        if frame is None and _REFUSED in self._child.last_words:
            hint = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
            raise NetworkError(f"ray:{self._address}: the cluster refuses the token", hint=hint)
        if frame is None:
            self._child.wait(_EXIT_S)
            raise NetworkError(f"ray:{self._address}: Ray's process ended: {commands.ending(self._child.status)}")
        _, kind, value = decoded(frame)
        self.nodes = value_of(kind, value)

    def _first_frame(self, connect_s: float) -> bytes | None:
        """Return the first frame, or None if the process has ended or if the cluster refuses the token."""
        first: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=lambda: first.put(self._child.receive(LONGEST)), daemon=True).start()
        deadline = time.monotonic() + connect_s
        while _REFUSED not in self._child.last_words:
            try:
                return first.get(timeout=_LOOK_S)
            except Empty:
                if time.monotonic() < deadline:
                    continue
            hint = f"this machine must be a node of the cluster, too: `ray start --address={self._address}`"
            raise NetworkError(f"ray:{self._address}: no connection within {connect_s:g} s", hint=hint)
        return None

    def _send_all(self) -> None:
        """Send queued messages in a thread, because sending may block. A queued None closes the pipe."""
        while (data := self._to_send.get()) is not None:
            self._child.send(data)
        self._child.stdin.close()

    def _receive_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive messages in a thread until the process has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while (data := self._child.receive(LONGEST)) is not None:
                loop.call_soon_threadsafe(self._take, *decoded(data))
            loop.call_soon_threadsafe(self._end, f"ray:{self._address}: Ray's process ended")

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
        """Kill the process if it stops answering."""
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


def _probe(address: str) -> None:
    """Raise NetworkError if no program listens at an address, because Ray would retry for two minutes."""
    port = int(address.rpartition(":")[2])
    try:
        socket.create_connection((host_of(address), port), timeout=_PROBE_S).close()
    except OSError as error:
        raise NetworkError(
            f"ray:{address}: cannot be reached: {error.strerror or error}",
            hint="check the address, and that the head is running: `ray status`",
        ) from error


def _environment() -> dict[str, str]:
    environment = commands.environment()
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # otherwise, Ray would run `uv run` on all nodes
    return {name: value for name, value in environment.items() if name not in ("RAY_ADDRESS", "RAY_RUNTIME_ENV_HOOK")}


START_S: Final = 60.0  # How long to wait for a node's CPUs.
_CLOSE_S: Final = 5.0  # Ray waits longer for a head node that has left.
_SHORT_ID: Final = 6  # The number of digits of a node's ID in names.


@dataclass(frozen=True, slots=True)
class ModelToSend:
    """A model, and the files that the nodes need, by the path fields of Open and the option `mmproj`."""

    asked: Open
    files: Mapping[str, Sequence[OriginalFile]]

    @classmethod
    def of(cls, asked: Open, reporter: Reporter) -> ModelToSend:
        """Return a model with its files. Hashing the files for the first time takes a while. Raises LlmrunError.

        A stand-in for a model needs no files.
        """
        named = {"path": asked.path, "draft": asked.draft, "mmproj": asked.options.get("mmproj")}
        paths = {field: Path(path) for field, path in named.items() if path and Path(path).exists()}
        return cls(asked, {field: originals(path, reporter) for field, path in paths.items()})


@dataclass(frozen=True, slots=True)
class Shows:
    """The callbacks that show the progress of the nodes, as for ModelProcess."""

    loading: Callable[[str, float], None]
    note: Callable[[str], None]
    detail: Callable[[str], None]


class RayCluster:
    """A connection to a cluster, which is reopened after a loss."""

    def __init__(self, address: str, process: RayProcess) -> None:
        self.address = address
        self._process = process
        self._connecting = asyncio.Lock()
        self._taken: dict[str, Mapping[str, Any]] = {}  # The node of each worker.
        self._in_use: set[str] = set()  # The names of the workers that have not been closed.

    @classmethod
    def connect(cls, name: str, *, offline: bool = False, connect_s: float = CONNECT_S) -> RayCluster:
        """Connect to the cluster that `ray` or `ray:HOST:PORT` denotes. Blocks. Raises NetworkError and UsageError.

        offline  refuse clusters that are not limited to this machine
        """
        address = find_address(name)
        if offline and not is_loopback(host_of(address)):
            raise NetworkError(f"ray:{address}: not available offline, because it is on a network")
        check_token(host_of(address))
        process = RayProcess.connected(address, connect_s=connect_s)
        try:
            if not process.nodes:
                raise NetworkError(f"ray:{address}: no node has a CPU", hint="`ray status` shows the cluster's nodes")
            for node in process.nodes:
                check_token(str(node["host"]))  # the head of a cluster on a network also listens on 127.0.0.1
        except LlmrunError:
            process.kill()
            raise
        return cls(address, process)

    def workers(self, model: ModelToSend, shows: Shows, *, start_s: float = START_S) -> list[RayWorker]:
        """Return a worker for each node."""
        hosts = Counter(str(node["host"]) for node in self._process.nodes)
        found = []
        for node in self._process.nodes:
            several = f"/{node['id'][:_SHORT_ID]}" if hosts[node["host"]] > 1 else ""
            name = f"ray:{node['host']}{several}"
            self._taken[name] = node
            self._in_use.add(name)
            found.append(RayWorker(name, self, model, shows, start_s))
        return found

    async def process(self) -> RayProcess:
        """Return the process that is connected to the cluster. Reconnect if the connection was lost."""
        async with self._connecting:
            if not self._process.is_alive:
                await self._process.close()
                self._process = await asyncio.to_thread(RayProcess.connected, self.address)
            await self._process.attach()
            return self._process

    async def node_of(self, name: str) -> Mapping[str, Any]:
        """Return a worker's node, or a node with the same address that joined later. Raises WorkerLost."""
        nodes = await (await self.process()).call("nodes")
        self._in_use.add(name)
        mine = self._taken[name]
        others = {node["id"] for other, node in self._taken.items() if other != name}
        same = [node for node in nodes if node["id"] == mine["id"]]
        same += [node for node in nodes if node["host"] == mine["host"] and node["id"] not in others]
        if not same:
            raise WorkerLost(f"{name}: the node has left the cluster")
        chosen: Mapping[str, Any] = same[0]
        self._taken[name] = chosen
        return chosen

    async def release(self, name: str) -> None:
        """Disconnect from the cluster if no other worker needs the connection."""
        self._in_use.discard(name)
        if not self._in_use:
            await self._process.close()

    def kill(self) -> None:
        """Disconnect from the cluster without an event loop. This method is idempotent."""
        self._process.kill()


class RayWorker:
    """A worker whose engine runs on a node of a cluster."""

    def __init__(self, name: str, cluster: RayCluster, model: ModelToSend, shows: Shows, start_s: float) -> None:
        self.name = name
        self.slots = 2 * int(model.asked.options["max_sequences"])
        self._cluster = cluster
        self._model = model
        self._shows = shows
        self._start_s = start_s
        self._process: RayProcess | None = None

    async def start(self) -> Mapping[str, Any]:
        """Open the worker, as `Worker.start` specifies. Send the model to the node if the model is missing there.

        Raises RefusedWorker if the node has another version of llmrun, or if no token protects the node.
        """
        await self._stop()
        node = await self._cluster.node_of(self.name)
        process = self._process = await self._cluster.process()
        process.listen(self.name, self._take_news)
        try:
            card: Mapping[str, Any] = await process.call(
                "open",
                name=self.name,
                node=node,
                model=to_builtins(self._model.asked),
                files=to_builtins(self._model.files),
                needs_token=not is_loopback(str(node["host"])),
                start_s=self._start_s,
            )
        except UsageError as error:
            raise RefusedWorker(str(error), hint=error.hint) from error
        return card

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Answer a call, as `Worker.answer` specifies."""
        if self._process is None:
            raise WorkerLost(f"{self.name}: closed")
        status, answer, ignored = await self._process.call("answer", name=self.name, url=url, body=dict(body))
        return Reply(status, answer, tuple(ignored))

    async def close(self) -> None:
        """Close the worker, as `Worker.close` specifies."""
        await self._stop()
        await self._cluster.release(self.name)

    async def _stop(self) -> None:
        """End the worker on the node."""
        process, self._process = self._process, None
        if process is not None and process.is_alive:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await process.call("close", name=self.name)
            except (LlmrunError, TimeoutError):
                return  # the actor has ended, or will end with the process

    def _take_news(self, kind: str, *news: Any) -> None:
        match kind:
            case base.LOADING:
                self._shows.loading(*news)
            case base.NOTE:
                self._shows.note(f"{self.name}: {news[0]}")
            case base.DETAIL:
                self._shows.detail(f"{self.name}: {news[0]}")
