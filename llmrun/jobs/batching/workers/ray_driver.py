"""The process that talks to a Ray cluster. No other module imports Ray.

Ray runs in a separate process, because Ray prints to stdout and stderr, replaces signal handlers, waits for minutes
without a limit, and ends its process a minute after losing the head of the cluster. None of these effects may reach the
process that runs the batch (see ray_cluster.py). The two processes exchange frames of JSON:

    to this process:    after CONNECTED, [id, method, arguments] in any order
    from this process:  [0, CONNECTED, nodes] or [0, FAILED, error]; then for each id, [id, OK, value],
                        [id, FAILED, error] or [id, LOST, reason]; [0, NEWS, [name, kind, ...]] and [0, GONE, reason]
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    AuthenticationError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmrun import __version__
from llmrun.base.errors import LlmrunError, NetworkError, UsageError
from llmrun.base.processes.frames import decoded, encoded, error_to_json, read_frame, write_frame
from llmrun.base.processes.worker import private_streams
from llmrun.jobs.batching.workers.base import (
    CONNECTED,
    FAILED,
    GONE,
    LOADING,
    LONGEST,
    LOST,
    NEWS,
    OK,
    WorkerLost,
    value_of,
)
from llmrun.jobs.batching.workers.ray_actor import RayActor
from llmrun.jobs.batching.workers.ray_address import host_of

SILENCE_S: Final = 30.0  # the longest time that an actor may go without responding
_CHUNK_BYTES: Final = 8 << 20
_BUSY_S: Final = 1.0  # The time between two checks whether another process has received the model.
_MOST_CALLS: Final = 1000  # concurrent calls of an actor; the batch itself limits the number of calls
_TOKEN: Final = "token"


class RayNode:
    """An actor on a node. If the actor dies or stops responding, all its calls raise WorkerLost."""

    def __init__(self, name: str, tell: Callable[..., None]) -> None:
        """Create a node without starting an actor.

        tell  called with the actor's news (see RayActor.news)
        """
        self._name = name
        self._tell = tell
        self._actor: Any = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None

    async def open(
        self,
        node: Mapping[str, Any],
        model: Mapping[str, Any],
        files: Mapping[str, Sequence[Mapping[str, Any]]],
        needs_token: bool,
        start_s: float,
    ) -> Any:
        """Start an actor, open a model in it, and return the model's entry of /v1/models.

        model        the JSON of an Open
        files        the JSON of the OriginalFiles of the model's path fields and of the option `mmproj`
        needs_token  refuse a node that does not authenticate with a token
        start_s      how long to wait until the node has free CPUs and the actor has started
        """
        try:
            async with asyncio.timeout(start_s):
                self._actor = await asyncio.to_thread(self._new_actor, node)
                hello = await self._call("hello")
        except TimeoutError:
            raise WorkerLost(
                f"{self._name}: the CPUs were not free within {start_s:g} s; `ray status` shows their users"
            ) from None
        if hello["version"] != __version__:
            raise UsageError(
                f"{self._name}: the node has llmrun {hello['version']}, but this machine has {__version__}",
                hint="install the same version on all nodes",
            )
        if needs_token and hello["auth_mode"].lower() != _TOKEN:
            raise UsageError(
                f"{self._name}: the node was started without RAY_AUTH_MODE=token, so anyone can control it",
                hint="set RAY_AUTH_MODE=token on all nodes and restart them",
            )
        self._watch = asyncio.create_task(self._pass_on_news())
        places: dict[str, Any] = {field: await self._place(encoded(list(each)), each) for field, each in files.items()}
        if (projector := places.pop("mmproj", "")) != "":
            places["options"] = {**model["options"], "mmproj": projector}
        return await self._call("open", encoded({**model, **places}))

    async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
        """Answer a call, as `RayActor.answer` specifies."""
        return await self._call("answer", url, encoded(body))

    async def close(self) -> None:
        """Kill the actor. The actor's engine ends with the actor."""
        self._lose("closed")
        if self._watch is not None:
            self._watch.cancel()
        actor, self._actor = self._actor, None
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    def _new_actor(self, node: Mapping[str, Any]) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node["id"], soft=False)
        # An actor that does not request the node's GPUs could not see these GPUs.
        remote = ray.remote(RayActor).options(
            num_cpus=node["cpus"],
            num_gpus=node["gpus"],
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_MOST_CALLS,
            scheduling_strategy=strategy,
        )
        return remote.remote(self._name, int(node["cpus"]))

    async def _place(self, files: bytes, described: Sequence[Mapping[str, Any]]) -> str:
        """Return the path of a model on the node, after sending the model if it is missing there."""
        while True:
            found = await self._call("find", files)
            if found is not None:
                return str(found)
            if await self._call("receive", files):
                break
            await asyncio.sleep(_BUSY_S)
        total = sum(int(file["size"]) for file in described)
        done = 0
        for index, file in enumerate(described):
            await self._send_file(index, Path(file["path"]), done, total)
            done += int(file["size"])
        return str(await self._call("end_receiving"))

    async def _send_file(self, index: int, path: Path, before: int, total: int) -> None:
        """Send one file of a model, beginning at the first byte that the node does not have."""
        offset = int(await self._call("begin_file", index))
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while data := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    self._tell(LOADING, f"sending {path.name} to {self._name}", (before + offset) / max(1, total))
                    await self._call("add_bytes", data)
                    offset += len(data)
        except OSError as error:
            raise LlmrunError(f"{path}: cannot be read: {error.strerror}") from error
        await self._call("end_file")

    async def _pass_on_news(self) -> None:
        """Forward the actor's news until the actor is lost."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    news = await self._call("news")
            except TimeoutError:
                return self._lose(f"no response for {SILENCE_S:.0f} s")
            except LlmrunError as error:
                return self._lose(str(error).removeprefix(f"{self._name}: "))
            for each in news:
                self._tell(*each)

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(f"{self._name}: {reason}")

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, and return its value. Raises WorkerLost and the errors of the method."""
        if self._actor is None:
            raise WorkerLost(f"{self._name}: closed")
        answer = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
        try:
            await asyncio.wait((answer, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WorkerLost(self._lost.result())
            return value_of(*decoded(answer.result()))
        except RayError as error:
            raise WorkerLost(f"{self._name}: {_reason(error)}") from error
        finally:
            answer.cancel()


def _reason(error: RayError) -> str:
    """Return a short reason why an actor cannot answer."""
    text = " ".join(str(error).split())
    if "No module named 'llmrun" in text:
        return "llmrun is missing or outdated in the Python environment of Ray on the node"
    match error:
        case OutOfMemoryError():
            return "Ray ended the worker because the node is out of memory"
        case ActorUnschedulableError():
            return "the node has left the cluster"
        case ActorUnavailableError():
            return "the node cannot be reached"
        case ActorDiedError() if "node" in text.partition("The actor is dead because")[2].partition(".")[0]:
            return "the node has left the cluster"
        case ActorDiedError():
            return "the worker's process has ended"
        case RayTaskError():
            return f"bug in llmrun: {text[-200:]}"
    return text[:200]


_EXIT_S: Final = 5.0
_PROBE_EACH_S: Final = 2.0
_PROBE_S: Final = 5.0
_GONE_S: Final = 20.0  # Ray ends this process after 60 s; the head may restart earlier if it has a database
_MOST_WORDS: Final = 300


class RayDriver:
    """Handles the messages from the process that runs the batch."""

    def __init__(self, source: IO[bytes], sink: IO[bytes], address: str) -> None:
        self._source = source
        self._sink = sink
        self._address = address
        self._nodes: dict[str, RayNode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Handle messages until the other process has ended."""
        self._start(self._watch_head())
        while (message := await asyncio.to_thread(read_frame, self._source, LONGEST)) is not None:
            self._start(self._handle(*decoded(message)))

    def send(self, call: int, kind: str, value: Any) -> None:
        """Send an answer, without blocking for long, because the other process reads messages immediately."""
        with contextlib.suppress(OSError):  # the other process has ended
            write_frame(self._sink, encoded([call, kind, value]))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, call: int, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            self.send(call, OK, await self._result(method, **arguments))
        except WorkerLost as error:
            self.send(call, LOST, str(error))
        except LlmrunError as error:
            self.send(call, FAILED, error_to_json(error))
        except Exception as error:  # noqa: BLE001  (Ray raises many kinds of errors, and none may end this process)
            self.send(call, LOST, one_line(error))

    async def _result(self, method: str, name: str = "", **arguments: Any) -> Any:
        match method:
            case "nodes":
                return await asyncio.to_thread(alive_nodes)
            case "open":
                await self._close(name)
                node = self._nodes[name] = RayNode(name, lambda *news: self.send(0, NEWS, [name, *news]))
                return await node.open(**arguments)
            case "answer":
                if name not in self._nodes:
                    raise WorkerLost(f"{name}: closed")
                return await self._nodes[name].answer(**arguments)
            case "close":
                return await self._close(name)
        return None  # a "ping" only checks that this process answers

    async def _close(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is not None:
            await node.close()

    async def _watch_head(self) -> None:
        """Notify the other process if the head of the cluster is gone."""
        host, port = host_of(self._address), int(self._address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < _GONE_S:
            await asyncio.sleep(_PROBE_EACH_S)
            try:
                async with asyncio.timeout(_PROBE_S):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                seen = loop.time()
            except OSError:
                continue
        self.send(0, GONE, f"ray:{self._address}: the head of the cluster cannot be reached")


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that have CPUs."""
    return [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerAddress"],
            "cpus": node["Resources"]["CPU"],
            "gpus": node["Resources"].get("GPU", 0),
        }
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]


def one_line(error: BaseException) -> str:
    """Return an error's message as a single line of limited length."""
    return " ".join(str(error).split())[:_MOST_WORDS] or type(error).__name__


def _connect(address: str) -> None:
    """Connect to a cluster. Raises NetworkError if the connection fails."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except AuthenticationError as error:
        raise NetworkError(f"ray:{address}: no token: {one_line(error).partition('.')[0]}") from error
    except (RayError, OSError, RuntimeError, ValueError) as error:
        hint = "the versions of Ray and Python must be the same everywhere" if "ersion" in str(error) else ""
        raise NetworkError(f"ray:{address}: {one_line(error)}", hint=hint) from error


def main() -> None:
    """Connect to the cluster at the address in the command's argument, and handle messages."""
    address = sys.argv[1]
    requests, answers = private_streams()
    driver = RayDriver(os.fdopen(requests, "rb"), os.fdopen(answers, "wb"), address)
    try:
        _connect(address)
        driver.send(0, CONNECTED, alive_nodes())
    except LlmrunError as error:
        return driver.send(0, FAILED, error_to_json(error))
    asyncio.run(driver.run())
    threading.Timer(_EXIT_S, os._exit, (0,)).start()  # Ray may wait for a head node that has left
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
