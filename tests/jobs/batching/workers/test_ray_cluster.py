"""Tests of batches on a real Ray cluster, whose nodes are all on this machine and run the scripted backend."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("there are no Ray clusters on Windows", allow_module_level=True)

from llmrun.base.errors import UsageError
from llmrun.engine.child.messages import Open
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.upkeep.model_copies import OriginalFile
from llmrun.jobs.batching.workers.base import CHAT, WorkerLost
from llmrun.jobs.batching.workers.ray_cluster import ModelToSend, RayCluster, RayWorker, Shows
from tests.support.batching.batch_runs import batch, write_lines
from tests.support.batching.ray_clusters import TestCluster, cluster, open_with_token
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.serving.pictures import PHOTO, data_url
from tests.support.serving.processes import scripted_model

pytestmark = pytest.mark.night
PATIENCE_S = 60.0
LINES = 80


@pytest.fixture(scope="module")
def ray() -> Iterator[TestCluster]:
    with cluster(2) as running:
        yield running


def arguments(folder: Path, step_seconds: float = 0.01) -> Sequence[str | Path]:
    source = write_lines(folder / "in.jsonl", [{"prompt": f"question {n % 9} and {n}"} for n in range(LINES)])
    script = folder / "script.json"
    script.write_text(json.dumps({"step_seconds": step_seconds}))
    return [source, "-m", script, "--backend", "scripted", "--speculate", "off", "-n", "20"]


def shown(texts: list[str]) -> Shows:
    return Shows(loading=lambda work, _: texts.append(work), note=texts.append, detail=lambda _: None)


def with_workers(
    ray: TestCluster, model: ModelToSend, work: Callable[[list[RayWorker]], Awaitable[None]], **options: Any
) -> list[str]:
    """Run `work` with the cluster's workers, and return what they have shown."""
    texts: list[str] = []

    async def run() -> None:
        connection = await asyncio.to_thread(RayCluster.connect, f"ray:{ray.address}")
        workers = connection.workers(model, shown(texts), **options)
        try:
            await work(workers)
        finally:
            for worker in workers:
                await worker.close()
            connection.kill()

    asyncio.run(run())
    return texts


def sent(folder: Path) -> ModelToSend:
    return ModelToSend.of(scripted_model(folder), Silent())


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_nodes_write_the_same_bytes_as_one_process(ray: TestCluster, tmp_path: Path) -> None:
    """Ray prints nothing that the user sees: -q leaves nothing of llmrun's own, not even progress on a slow machine."""
    common = arguments(tmp_path)
    local, distributed = tmp_path / "local.jsonl", tmp_path / "ray.jsonl"
    assert batch(*common, "-o", local).returncode == 0
    done = batch(*common, "-o", distributed, "--workers", f"ray:{ray.address}", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert distributed.read_bytes() == local.read_bytes()


def test_a_model_is_sent_to_nodes_that_lack_it(ray: TestCluster, tmp_path: Path) -> None:
    """The model's path leads to the file only in the process that sends it, because it depends on the folder."""
    asked = scripted_model(tmp_path)
    data = Path(asked.path).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    path = f"/proc/self/cwd{asked.path}"
    model = ModelToSend(
        Open(path, asked.name, asked.options, speculate=False), {"path": [OriginalFile(path, len(data), sha256)]}
    )
    received = Path(os.environ["LLMRUN_DATA_DIR"]) / "models" / "received" / sha256 / Path(path).name
    received.unlink(missing_ok=True)

    async def run(workers: list[RayWorker]) -> None:
        first, second = workers
        await first.start()
        assert received.read_bytes() == data
        await second.start()
        reply = await second.answer(CHAT, {"messages": [{"role": "user", "content": "Hello"}]})
        assert reply.body["choices"][0]["message"]["content"] == "You said: Hello"
        assert reply.body["model"] == asked.name

    texts = with_workers(ray, model, run)
    assert sum(text.startswith(f"sending {received.name} to ray:127.0.0.1/") for text in texts) == 1


def test_a_projector_is_sent_to_nodes_that_lack_it(ray: TestCluster, tmp_path: Path) -> None:
    asked = scripted_model(tmp_path)
    data = json.dumps({"columns": 1, "lines": 1}).encode()  # a projector that sees each image as one row
    (tmp_path / "mmproj.json").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    projector = f"/proc/self/cwd{tmp_path / 'mmproj.json'}"
    asked = Open(asked.path, asked.name, {**asked.options, "mmproj": projector}, speculate=False)
    files = {**ModelToSend.of(asked, Silent()).files, "mmproj": [OriginalFile(projector, len(data), sha256)]}
    url = {"type": "image_url", "image_url": {"url": data_url(PHOTO)}}

    async def run(workers: list[RayWorker]) -> None:
        await workers[0].start()
        reply = await workers[0].answer(CHAT, {"messages": [{"role": "user", "content": [url]}]})
        assert reply.body["choices"][0]["message"]["content"] == "You said: [1 row of #ff0000]"

    texts = with_workers(ray, ModelToSend(asked, files), run)
    assert any(text.startswith("sending mmproj.json to ray:127.0.0.1/") for text in texts)


def test_nodes_answer_lines_with_images(ray: TestCluster, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PHOTO)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"{n}?", "images": ["cat.png"]} for n in range(4)])
    (tmp_path / "mmproj.json").write_text(json.dumps({"columns": 1, "lines": 1}))
    flags = ("--backend", "scripted", "--mmproj", tmp_path / "mmproj.json", "--image-dir", tmp_path)
    done = batch(source, "-m", "any", *flags, "-o", tmp_path / "out.jsonl", "--workers", f"ray:{ray.address}")
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"You said: [1 row of #ff0000]{n}?" for n in range(4)]


def test_a_node_without_a_token_says_so(ray: TestCluster, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the node was started without RAY_AUTH_MODE=token"):
        open_with_token(ray.address, tmp_path)


def test_a_node_that_another_job_uses_is_named(ray: TestCluster, tmp_path: Path) -> None:
    async def run(workers: list[RayWorker]) -> None:
        busy = workers[0]
        await busy.start()

        async def too(others: list[RayWorker]) -> None:
            other = next(each for each in others if each.name == busy.name)
            with pytest.raises(WorkerLost, match=f"{busy.name}: the CPUs were not free within 2 s"):
                await other.start()

        await asyncio.to_thread(with_workers, ray, sent(tmp_path), too, start_s=2.0)

    with_workers(ray, sent(tmp_path), run)


def test_closed_workers_are_lost_and_leave_no_process(ray: TestCluster, tmp_path: Path) -> None:
    call: Mapping[str, Any] = {"messages": [{"role": "user", "content": "x" * 4000}]}

    async def run(workers: list[RayWorker]) -> None:
        first, second = workers
        with pytest.raises(WorkerLost, match="closed"):
            await first.answer(CHAT, call)
        await asyncio.gather(first.start(), second.start())
        assert first.slots == 8
        running = asyncio.create_task(first.answer(CHAT, call))
        await asyncio.sleep(0.1)
        await first.close()
        with pytest.raises(WorkerLost, match="closed"):
            await running

    with_workers(ray, sent(tmp_path), run)
    until(lambda: not ray.actors())


def test_a_killed_worker_and_a_removed_node_lose_nothing(ray: TestCluster, tmp_path: Path) -> None:
    """The second worker may be ready only after the first was killed, because nodes need seconds to start one.

    It is the last test, because the cluster lists the removed node for a while.
    """
    common = arguments(tmp_path, 0.03)
    local, distributed = tmp_path / "local.jsonl", tmp_path / "ray.jsonl"
    assert batch(*common, "-o", local).returncode == 0
    command = [*LLMRUN, "batch", *map(str, common), "-o", str(distributed), "--workers", f"ray:{ray.address}"]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    journal = distributed.with_name(distributed.name + ".partial")
    until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > LINES // 10)
    ray.actors()[0].send_signal(signal.SIGKILL)
    until(lambda: journal.read_bytes().count(b"\n") > LINES // 3)
    ray.remove_node(0)
    _, told = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, told
    assert b"the worker's process has ended" in told
    assert distributed.read_bytes() == local.read_bytes()
