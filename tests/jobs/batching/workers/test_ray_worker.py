"""Tests of the workers on a cluster, with a connection that is not real."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from llmrun.base.errors import UsageError
from llmrun.engine.child.messages import Open
from llmrun.hub.progress_reporter import Silent
from llmrun.jobs.batching.workers.base import CHAT, RefusedWorker, Reply, WorkerLost
from llmrun.jobs.batching.workers.ray_cluster import ModelToSend, RayCluster, RayProcess, RayWorker, Shows


def node(name: str, host: str) -> dict[str, Any]:
    return {"id": name * 8, "host": host, "cpus": 2.0, "gpus": 0.0}


class FakeProcess:
    """A process that is connected to a cluster with two nodes on one machine, and one on another."""

    def __init__(self) -> None:
        self.nodes = [node("a", "10.0.0.5"), node("b", "10.0.0.5"), node("c", "10.0.0.6")]
        self.is_alive = True
        self.called: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.tell: Callable[..., None] = lambda *_: None

    async def attach(self) -> None:
        pass

    async def close(self) -> None:
        self.is_alive = False

    def listen(self, name: str, news: Callable[..., None]) -> None:
        self.tell = news

    async def call(self, method: str, **arguments: Any) -> Any:
        self.called.append((method, arguments.get("node")))
        if method == "nodes":
            return self.nodes
        if method == "open" and self.error is not None:
            raise self.error
        return {"open": {"id": "m"}, "answer": [200, {"choices": []}, ["x"]]}.get(method)


def run(work: Callable[[FakeProcess, list[RayWorker]], Awaitable[None]], shown: list[str]) -> None:
    process = FakeProcess()
    shows = Shows(lambda text, share: shown.append(f"{text} {share:.0%}"), shown.append, shown.append)
    model = ModelToSend.of(Open("no such file", options={"max_sequences": 4}), Silent())

    async def all_of_it() -> None:
        await work(process, RayCluster("10.0.0.5:6379", cast("RayProcess", process)).workers(model, shows))

    asyncio.run(all_of_it())


def test_workers_are_named_after_their_nodes() -> None:
    shown: list[str] = []

    async def work(process: FakeProcess, workers: list[RayWorker]) -> None:
        assert [worker.name for worker in workers] == ["ray:10.0.0.5/aaaaaa", "ray:10.0.0.5/bbbbbb", "ray:10.0.0.6"]
        assert await workers[2].start() == {"id": "m"}
        assert await workers[2].answer(CHAT, {}) == Reply(200, {"choices": []}, ("x",))
        for news in (("loading", "weights", 0.5), ("note", "hello"), ("detail", "more")):
            process.tell(*news)

    run(work, shown)
    assert shown == ["weights 50%", "ray:10.0.0.6: hello", "ray:10.0.0.6: more"]


def test_a_node_that_was_restarted_is_used_again() -> None:
    async def work(process: FakeProcess, workers: list[RayWorker]) -> None:
        process.nodes = [node("a", "10.0.0.5"), node("d", "10.0.0.6")]
        with pytest.raises(WorkerLost, match="the node has left the cluster"):
            await workers[1].start()
        await workers[2].start()
        assert process.called[-1] == ("open", node("d", "10.0.0.6"))

    run(work, [])


def test_an_unsuitable_node_is_refused() -> None:
    async def work(process: FakeProcess, workers: list[RayWorker]) -> None:
        process.error = UsageError("another version", hint="install it")
        with pytest.raises(RefusedWorker, match="another version") as raised:
            await workers[0].start()
        assert raised.value.hint == "install it"

    run(work, [])


def test_the_last_worker_that_is_closed_disconnects() -> None:
    async def work(process: FakeProcess, workers: list[RayWorker]) -> None:
        await workers[0].start()
        for worker in workers:
            assert process.is_alive
            await worker.close()
        assert not process.is_alive
        assert ("close", None) in process.called
        with pytest.raises(WorkerLost, match="closed"):
            await workers[0].answer(CHAT, {})

    run(work, [])
