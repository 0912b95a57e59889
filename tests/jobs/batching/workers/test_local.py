"""Tests of the worker on this machine, with the scripted backend in a real child process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.engine.child.messages import Open
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION, WorkerLost
from llmrun.jobs.batching.workers.local import LocalWorker
from tests.support.serving.processes import scripted_model

pytestmark = pytest.mark.push


def worker(model: Open) -> LocalWorker:
    return LocalWorker(model, loading=lambda work, fraction: None, note=lambda words: None, detail=lambda words: None)


def chat(text: str, **fields: Any) -> Mapping[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "seed": 1, **fields}


def test_calls_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        local = worker(scripted_model(tmp_path))
        assert local.slots == 8
        card = await local.start()
        assert (card["id"], card["owned_by"], card["batch_invariant"]) == ("a-model", "llmrun", True)
        replies = await asyncio.gather(
            local.answer(CHAT, chat("Hello", unknown_field=1)),
            local.answer(CHAT, chat("twice", n=2)),
            local.answer(COMPLETION, {"prompt": "Once", "seed": 1, "max_tokens": 5}),
            local.answer(COMPLETION, {"prompt": [65, 66], "echo": True, "logprobs": 1, "max_tokens": 0}),
            local.answer(CHAT, chat("x", temperature="hot")),
            local.answer(CHAT, chat("x" * 100_000)),
        )
        await local.close()
        hello, twice, once, scored, hot, long = replies
        assert hello.status == 200
        assert hello.body["choices"][0]["message"]["content"] == "You said: Hello"
        assert hello.ignored == ("unknown_field",)
        assert len(twice.body["choices"]) == 2
        assert once.body["object"] == "text_completion"
        assert scored.body["choices"][0]["text"] == "AB"
        assert len(scored.body["choices"][0]["logprobs"]["token_logprobs"]) == 2
        assert (hot.status, hot.body["error"]["param"]) == (400, "temperature")
        assert long.body["error"]["code"] == "context_length_exceeded"

    asyncio.run(run())


@pytest.mark.parametrize(("tokens", "status"), [(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 200), ((), 400)])
def test_models_that_can_fill_gaps_do(tokens: tuple[str, ...], status: int, tmp_path: Path) -> None:
    async def run() -> None:
        local = worker(scripted_model(tmp_path, control_tokens=tokens))
        await local.start()
        reply = await local.answer(COMPLETION, {"prompt": "a", "suffix": "bc", "seed": 1, "max_tokens": 5})
        await local.close()
        assert reply.status == status
        if status == 200:
            assert reply.body["usage"]["prompt_tokens"] == 4 + 3
        else:
            assert reply.body["error"]["param"] == "suffix"

    asyncio.run(run())


@pytest.mark.night
def test_a_killed_engine_is_not_noticed(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")

    async def run() -> None:
        local = worker(scripted_model(tmp_path, step_seconds=0.02))
        await local.start()
        asked = [asyncio.create_task(local.answer(CHAT, chat(f"number {n}"))) for n in range(6)]
        await asyncio.sleep(0.2)
        before = local.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        replies = await asyncio.gather(*asked)
        assert local.pid != before
        await local.close()
        assert [each.body["choices"][0]["message"]["content"] for each in replies] == [
            f"You said: number {n}" for n in range(6)
        ]

    asyncio.run(run())


@pytest.mark.night
def test_a_closed_worker_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        local = worker(scripted_model(tmp_path, step_seconds=0.1))
        with pytest.raises(WorkerLost):
            await local.answer(CHAT, chat("too early"))
        await local.start()
        asked = asyncio.create_task(local.answer(CHAT, chat("cut off")))
        await asyncio.sleep(0.2)
        await local.close()
        with pytest.raises(WorkerLost, match="this machine: the server is shutting down"):
            await asked
        await local.start()
        assert (await local.answer(CHAT, chat("again"))).status == 200
        await local.close()

    asyncio.run(run())


def test_a_model_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")

    async def run() -> None:
        local = worker(Open(str(broken), "broken", {"max_sequences": 1}))
        with pytest.raises(LlmrunError, match=r"broken\.gguf"):
            await local.start()
        await local.close()

    asyncio.run(run())
