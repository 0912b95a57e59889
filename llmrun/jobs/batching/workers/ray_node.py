"""One node of a Ray cluster, as the process that talks to Ray sees it (see ray_driver.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmrun import __version__
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.isolation.frames import decoded, encoded
from llmrun.jobs.batching.workers.base import WorkerLost
from llmrun.jobs.batching.workers.ray_actor import RayActor
from llmrun.jobs.batching.workers.ray_messages import LOADING, value_of

SILENCE_S: Final = 30.0  # the longest time that an actor may be silent
_CHUNK_BYTES: Final = 8 << 20
_BUSY_S: Final = 1.0  # between two looks whether another process has received the model
_MOST_CALLS: Final = 1000  # that an actor runs at a time; the batch bounds how many there are
_TOKEN: Final = "token"


class RayNode:
    """An actor on a node. If it dies or falls silent, all its calls raise WorkerLost."""

    def __init__(self, name: str, tell: Callable[..., None]) -> None:
        """Create a node without an actor.

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
        """Start an actor and open a model in it. Returns its entry of /v1/models.

        model        the JSON of an Open
        files        the JSON of the OriginalFiles of the model's fields that are paths
        needs_token  refuse a node that does not authenticate with a token
        start_s      how long to wait until the node has free CPUs and the actor has started
        """
        try:
            async with asyncio.timeout(start_s):
                self._actor = await asyncio.to_thread(self._new_actor, node)
                hello = await self._call("hello")
        except TimeoutError:
            raise WorkerLost(
                f"{self._name}: its CPUs have not become free within {start_s:g} s; `ray status` shows who uses them"
            ) from None
        if hello["version"] != __version__:
            raise UsageError(
                f"{self._name}: llmrun {hello['version']} is installed there, and {__version__} here",
                hint="install the same version on all nodes",
            )
        if needs_token and hello["auth_mode"].lower() != _TOKEN:
            raise UsageError(
                f"{self._name}: the node was started without RAY_AUTH_MODE=token, so anyone can control it",
                hint="set RAY_AUTH_MODE=token on all nodes and restart them",
            )
        self._watch = asyncio.create_task(self._pass_on_news())
        places = {field: await self._place(encoded(list(each)), each) for field, each in files.items()}
        return await self._call("open", encoded({**model, **places}))

    async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
        """Answer a call. See RayActor.answer."""
        return await self._call("answer", url, encoded(body))

    async def close(self) -> None:
        """Kill the actor. Its engine ends with it."""
        self._lose("closed")
        if self._watch is not None:
            self._watch.cancel()
        actor, self._actor = self._actor, None
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    def _new_actor(self, node: Mapping[str, Any]) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node["id"], soft=False)
        # An actor without the node's GPUs could not see them.
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
        """Return where a model is on the node, after sending it if it is not there."""
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
        """Send one file of a model, from the byte on that the node does not have."""
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
        """Pass on the actor's news until it is lost."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    news = await self._call("news")
            except TimeoutError:
                return self._lose(f"no sign of life for {SILENCE_S:.0f} s")
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
    """Return in a few words why an actor cannot answer."""
    text = " ".join(str(error).split())
    if "No module named 'llmrun" in text:
        return "the node has no llmrun, or an older one, in the Python that runs Ray"
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
