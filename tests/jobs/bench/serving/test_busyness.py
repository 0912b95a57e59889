"""Tests of what servers report about their running requests."""

from __future__ import annotations

import asyncio

import pytest

from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.bench.serving.driving import Sender
from llmrun.jobs.bench.serving.session import unfinished, wait_until_idle
from tests.support.servers.fake_model import FakeModel
from tests.support.servers.hostile_server import response, serving

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="0"} 7.0
"""
LLAMA = """llamacpp:requests_processing 1
llamacpp:requests_deferred 4
llamacpp:prompt_tokens_total 99
"""
OURS = """# TYPE llmrun_requests_running gauge
llmrun_requests_running{model="a"} 1
llmrun_requests_waiting{model="a"} 0
llmrun_requests_total{status="200"} 40
"""
SGLANG = 'sglang:num_running_reqs{name="m"} 5.0\nsglang:num_queue_reqs{name="m"} 1.0\n'


def seen(script: object) -> tuple[int, str] | None:
    async def run() -> tuple[int, str] | None:
        sender = Sender(parse_endpoint(server.url))
        await sender.connect()
        return await unfinished(sender)

    with serving(script) as server:  # type: ignore[arg-type]
        return asyncio.run(run())


@pytest.mark.parametrize(("text", "count"), [(VLLM, 5), (LLAMA, 5), (OURS, 1), (SGLANG, 6)])
def test_metrics_of_known_servers_are_read(text: str, count: int) -> None:
    assert seen(response(text.encode(), kind="text/plain")) == (count, "/metrics")


@pytest.mark.parametrize("path", ["/metrics", "/slots", "/health"])
def test_the_first_path_that_reports_requests_counts(path: str) -> None:
    assert seen(FakeModel(reports=path)) == (0, path)
    assert seen(FakeModel(reports=path, running=1)) == (1, path)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"status": "ok"}', b'[{"id": 0}]', b"\xff\xfe", b"[" * 100_000, b"running 5\n"]
)
def test_other_pages_report_nothing(body: bytes) -> None:
    assert seen(response(body, kind="text/html")) is None


def test_waiting_ends_when_the_server_is_idle() -> None:
    model = FakeModel(running=2)

    async def run() -> tuple[int, str, float] | None:
        sender = Sender(parse_endpoint(server.url))
        await sender.connect()
        waiting = asyncio.create_task(wait_until_idle(sender, 30.0))
        while not server.asked:
            await asyncio.sleep(0)
        model.running = 0
        return await waiting

    with serving(model) as server:
        found = asyncio.run(run())
    assert found is not None
    assert found[:2] == (0, "/metrics")


def test_a_server_that_stays_busy_is_told_so() -> None:
    async def run() -> tuple[int, str, float] | None:
        sender = Sender(parse_endpoint(server.url))
        await sender.connect()
        return await wait_until_idle(sender, 0.0)

    with serving(FakeModel(running=3)) as server:
        found = asyncio.run(run())
    assert found is not None
    assert found[0] == 3
