"""Workers on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import LlmrunError, NetworkError, UsageError
from llmrun.engine.child.codec import codec_of
from llmrun.engine.child.messages import Open
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.upkeep.model_copies import OriginalFile, originals
from llmrun.jobs.batching.workers import ray_messages
from llmrun.jobs.batching.workers.base import RefusedWorker, Reply, WorkerLost
from llmrun.jobs.batching.workers.ray_address import check_token, find_address, host_of, is_loopback
from llmrun.jobs.batching.workers.ray_process import CONNECT_S, RayProcess

START_S: Final = 60.0  # how long to wait for a node's CPUs
_CLOSE_S: Final = 5.0  # Ray waits longer for a head that has gone
_SHORT_ID: Final = 6  # digits


@dataclass(frozen=True, slots=True)
class ModelToSend:
    """A model, and the files that the nodes need to open it, by the fields of Open that are paths."""

    asked: Open
    files: Mapping[str, Sequence[OriginalFile]]

    @classmethod
    def of(cls, asked: Open, reporter: Reporter) -> ModelToSend:
        """Describe a model's files. They are hashed the first time, which takes a while. Raises LlmrunError.

        A stand-in for a model needs no file.
        """
        named = {"path": asked.path, "draft": asked.draft}
        paths = {field: Path(path) for field, path in named.items() if path and Path(path).exists()}
        return cls(asked, {field: originals(path, reporter) for field, path in paths.items()})


@dataclass(frozen=True, slots=True)
class Shows:
    """The callbacks that show what the nodes do. See ModelProcess."""

    loading: Callable[[str, float], None]
    note: Callable[[str], None]
    detail: Callable[[str], None]


class RayCluster:
    """A connection to a cluster, which is made again when it is lost."""

    def __init__(self, address: str, process: RayProcess) -> None:
        self.address = address
        self._process = process
        self._connecting = asyncio.Lock()
        self._taken: dict[str, Mapping[str, Any]] = {}  # the node of each worker
        self._in_use: set[str] = set()  # the names of the workers that have not been closed

    @classmethod
    def connect(cls, name: str, *, offline: bool = False, connect_s: float = CONNECT_S) -> RayCluster:
        """Connect to the cluster that `ray` or `ray:HOST:PORT` means. Blocks. Raises NetworkError and UsageError.

        offline  refuse clusters that are not on this machine alone
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
        """Return the process that is connected to the cluster, after connecting again if it was lost."""
        async with self._connecting:
            if not self._process.is_alive:
                await self._process.close()
                self._process = await asyncio.to_thread(RayProcess.connected, self.address)
            await self._process.attach()
            return self._process

    async def node_of(self, name: str) -> Mapping[str, Any]:
        """Return a worker's node, or a node with the same address that has joined since. Raises WorkerLost."""
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
        """Disconnect from the cluster if no other worker needs it."""
        self._in_use.discard(name)
        if not self._in_use:
            await self._process.close()

    def kill(self) -> None:
        """Disconnect from the cluster, without an event loop. Idempotent."""
        self._process.kill()


class RayWorker:
    """An engine on a node of a cluster. See Worker."""

    def __init__(self, name: str, cluster: RayCluster, model: ModelToSend, shows: Shows, start_s: float) -> None:
        self.name = name
        self.slots = 2 * int(model.asked.options["max_sequences"])
        self._cluster = cluster
        self._model = model
        self._shows = shows
        self._start_s = start_s
        self._process: RayProcess | None = None

    async def start(self) -> Mapping[str, Any]:
        """See Worker. Sends the model to the node if it is not there.

        Raises RefusedWorker if the node has another version of llmrun, or is not protected by a token.
        """
        await self._stop()
        node = await self._cluster.node_of(self.name)
        process = self._process = await self._cluster.process()
        process.listen(self.name, self._take_news)
        files = {field: codec_of(Sequence[OriginalFile]).encode(each) for field, each in self._model.files.items()}
        try:
            card: Mapping[str, Any] = await process.call(
                "open",
                name=self.name,
                node=node,
                model=codec_of(Open).encode(self._model.asked),
                files=files,
                needs_token=not is_loopback(str(node["host"])),
                start_s=self._start_s,
            )
        except UsageError as error:
            raise RefusedWorker(str(error), hint=error.hint) from error
        return card

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """See Worker."""
        if self._process is None:
            raise WorkerLost(f"{self.name}: closed")
        status, answer, ignored = await self._process.call("answer", name=self.name, url=url, body=dict(body))
        return Reply(status, answer, tuple(ignored))

    async def close(self) -> None:
        """See Worker."""
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
                return  # the actor has gone, or ends with the process

    def _take_news(self, kind: str, *news: Any) -> None:
        match kind:
            case ray_messages.LOADING:
                self._shows.loading(*news)
            case ray_messages.NOTE:
                self._shows.note(f"{self.name}: {news[0]}")
            case ray_messages.DETAIL:
                self._shows.detail(f"{self.name}: {news[0]}")
