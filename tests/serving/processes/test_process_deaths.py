"""Tests of served models whose processes are killed, stopped and broken."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.base.errors import LlmrunError, ModelNotFound, Unavailable, UsageError
from llmrun.base.processes import commands
from llmrun.engine.child.messages import Embed, Open
from llmrun.engine.requests import TextDelta, TextPrompt
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.served_model import State
from llmrun.serving.processes.supervisor import ServingLimits
from tests.support.engine.pictures import BLUE, RED, ask, plain, png
from tests.support.serving.deadly_backend import FAILS, KILLS, KILLS_LATER
from tests.support.serving.killing import kill_under_load
from tests.support.serving.processes import (
    DEADLY,
    PATIENCE_S,
    Listening,
    chat,
    hear,
    noise,
    running,
    scripted_model,
    until,
)

LIMITS = ServingLimits(stuck_s=1.0, first_pause_s=0.05, max_pause_s=0.1)
STEP_S = 0.002


def embedding(*texts: str) -> Embed:
    return Embed([TextPrompt(text) for text in texts])


def killed(model: ModelProcess) -> int:
    """Kill the model's process and return its ID."""
    pid = model.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.night
def test_no_answer_changes_when_the_process_is_killed(tmp_path: Path) -> None:
    """`scripts/soak serve-kill` kills more often."""
    tally = asyncio.run(kill_under_load(scripted_model(tmp_path, step_seconds=STEP_S), kills=4, seed=1))
    assert (tally.kills, tally.failed, tally.different) == (4, 0, 0)
    assert tally.replayed > 0


@pytest.mark.night
def test_a_stuck_process_is_restarted(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), LIMITS) as model:
            expected = await hear(model, noise(1))
            for busy in (True, False):
                pid = model.pid
                assert pid is not None
                task = asyncio.create_task(hear(model, noise(1)))
                if busy:
                    await until(lambda: model.load.running)
                else:
                    await task
                os.kill(pid, signal.SIGSTOP)
                await until(lambda: model.state is State.RESTARTING)
                await until(lambda: model.state is State.READY)
                assert not psutil.pid_exists(pid)
                assert (await task).pieces == expected.pieces
            assert model.load.restarts == 2

    asyncio.run(ask())


@pytest.mark.night
@pytest.mark.parametrize(
    ("prompt", "words"), [(KILLS, "SIGKILL"), (KILLS_LATER, "SIGKILL"), (FAILS, "divides by zero")]
)
def test_a_deadly_request_fails_alone(tmp_path: Path, prompt: str, words: str) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), LIMITS, DEADLY) as model:
            bad = asyncio.create_task(hear(model, chat(f"please {prompt}")))
            await until(lambda: model.load.running or model.load.restarts)
            others = [asyncio.create_task(hear(model, chat(f"number {n}"))) for n in range(8)]
            with pytest.raises(LlmrunError, match="the engine ended repeatedly") as caught:
                await bad
            assert words in str(caught.value)
            ends = await asyncio.gather(*others, return_exceptions=True)
            if prompt != KILLS_LATER:  # otherwise, requests that ran beside it at both deaths fail too
                assert [getattr(end, "text", end) for end in ends] == [f"You said: number {n}" for n in range(8)]
            assert (await hear(model, chat("next"))).text == "You said: next"
            assert model.load.restarts == 2

    asyncio.run(ask())


SLICES = {"encode_tiles": 20, "tile_seconds": 0.02}


@pytest.mark.push
def test_images_are_encoded_again_when_the_process_is_killed(tmp_path: Path) -> None:
    async def ask_all() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S, projector=SLICES), LIMITS) as model:
            image = asyncio.create_task(hear(model, ask([png(plain(64, 64, BLUE)), "?"])))
            text = asyncio.create_task(hear(model, chat("a long question " * 5)))
            await until(lambda: model.load.running == 2)
            killed(model)
            assert (await image).text == "You said: [4 rows of #0000ff]?"
            assert (await text).text == "You said: " + "a long question " * 5
            assert model.load.restarts == 1

    asyncio.run(ask_all())


@pytest.mark.push
@pytest.mark.parametrize("tile_s", [0.02, 0.15])
def test_a_deadly_image_fails_alone(tmp_path: Path, tile_s: float) -> None:
    """The encoder works in the engine's process, between the steps of other requests, in one or several slices."""
    slices = {"encode_tiles": 6, "tile_seconds": tile_s}

    async def ask_all() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S, projector=slices), LIMITS, DEADLY) as model:
            words = [f"number {n} " * 9 for n in range(2)]
            others = [asyncio.create_task(hear(model, chat(text))) for text in words]
            others.append(asyncio.create_task(hear(model, ask([png(plain(64, 64, BLUE)), "?"]))))
            await until(lambda: model.load.running)
            with pytest.raises(LlmrunError, match="the engine ended repeatedly"):
                await hear(model, ask([png(plain(64, 64, RED)), "?"]))
            expected = [f"You said: {text}" for text in (*words, "[4 rows of #0000ff]?")]
            ends = await asyncio.gather(*others, return_exceptions=True)
            assert [getattr(end, "text", end) for end in ends] == expected
            assert model.load.restarts == 2

    asyncio.run(ask_all())


@pytest.mark.push
def test_calls_are_repeated_when_the_process_is_killed(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=0.02), LIMITS) as model:
            expected = await model.embed(embedding("a text"))
            tasks = [asyncio.create_task(model.embed(embedding(*["x" * 200] * 40, "a text"))) for _ in range(3)]
            await asyncio.sleep(0.1)
            killed(model)
            for found in await asyncio.gather(*tasks):
                assert found.data.endswith(expected.data)
            assert model.load.restarts == 1

    asyncio.run(ask())


@pytest.mark.push
def test_a_deadly_text_fails_alone(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path), LIMITS, DEADLY) as model:
            expected = await model.embed(embedding("a text"))
            bad = asyncio.create_task(model.embed(embedding(f"please {KILLS}")))
            others = [asyncio.create_task(model.embed(embedding("a text"))) for _ in range(8)]
            with pytest.raises(LlmrunError, match="the engine ended repeatedly while it ran this request: SIGKILL"):
                await bad
            assert {found.data for found in await asyncio.gather(*others)} == {expected.data}
            assert model.load.restarts == 2

    asyncio.run(ask())


@pytest.mark.push
def test_counts_go_on_after_a_restart(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path), LIMITS) as model:
            await hear(model, chat("one"))
            await until(lambda: model.load.generated_tokens)
            before = model.load
            killed(model)
            await hear(model, chat("two"))
            await until(lambda: model.load.generated_tokens > before.generated_tokens)
            assert model.load.prompt_tokens > before.prompt_tokens
            assert model.load.steps > before.steps
            assert model.load.restarts == 1

    asyncio.run(ask())


@pytest.mark.night
def test_without_batch_invariance_text_is_not_replayed(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, "varying", step_seconds=STEP_S), LIMITS, DEADLY) as model:
            tasks = [asyncio.create_task(hear(model, chat("x" * 200))) for _ in range(6)]
            await until(lambda: sum(one.deltas.count > 5 for one in model._requests.values()) == 4)
            killed(model)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [end for end in ends if isinstance(end, LlmrunError)]
            assert [str(end) for end in failed] == ["the engine ended while it ran this request: SIGKILL"] * 4
            assert sum(not isinstance(end, BaseException) for end in ends) == 2

    asyncio.run(ask())


@pytest.mark.night
def test_a_replay_with_other_text_is_an_error(tmp_path: Path) -> None:
    seen = []

    async def hear_and_kill(model: ModelProcess) -> None:
        async for event in Listening(model, chat("x", max_tokens=200)):
            seen.append(event)
            if len(seen) == 10:
                killed(model)

    async def ask() -> None:
        async with running(scripted_model(tmp_path, "lying", step_seconds=STEP_S), LIMITS, DEADLY) as model:
            with pytest.raises(LlmrunError, match="its answer differs"):
                await hear_and_kill(model)
            await until(lambda: model.load.running == 0)

    asyncio.run(ask())
    assert 9 <= sum(isinstance(event, TextDelta) for event in seen) < 200


@pytest.mark.push
def test_cancelled_requests_end_when_the_process_dies(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), LIMITS) as model:
            asked = Listening(model, chat("x" * 3000))
            await until(lambda: model.load.running)
            os.kill(model.pid or 0, signal.SIGSTOP)
            asked.cancel()
            killed(model)
            events = [event async for event in asked]
            assert events[-1].reason == "cancelled"  # type: ignore[union-attr]
            await until(lambda: model.load.restarts == 1)
            assert not model._requests

    asyncio.run(ask())


@pytest.mark.push
def test_requests_during_a_restart_wait_in_the_server(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=0.02), LIMITS) as model:
            killed(model)
            await until(lambda: model.state is State.RESTARTING)
            held, dropped = Listening(model, chat("held")), Listening(model, chat("dropped"))
            assert model.load.waiting == 2
            dropped.cancel()
            assert [type(event).__name__ async for event in dropped] == ["Finished"]
            tokens, vector = await asyncio.gather(
                model.tokenize("x", add_special=False, parse_special=False), model.embed(embedding("x"))
            )
            assert (tokens, vector.tokens) == ([ord("x")], [2])
            assert (await held.accepted()).prompt_tokens > 0
            assert model.load.running + model.load.waiting == 1

    asyncio.run(ask())


@pytest.mark.night
def test_a_model_that_cannot_be_opened_again_is_tried_until_it_can(tmp_path: Path) -> None:
    async def ask() -> None:
        opening = scripted_model(tmp_path)
        notes: list[str] = []
        model = ModelProcess(opening, LIMITS, note=notes.append)
        await model.start()
        script = Path(opening.path)
        good = script.read_text()
        script.write_text("[]")
        killed(model)
        await until(lambda: len(notes) == 3)
        assert model.state is State.RESTARTING
        held = asyncio.create_task(hear(model, chat("held")))
        await asyncio.sleep(0)
        script.write_text(good)
        assert (await held).text == "You said: held"
        assert notes[0] == "the engine's process ended (SIGKILL); restarting it"
        assert notes[1].startswith("cannot reopen the model, trying again: invalid script")
        await model.close()

    asyncio.run(ask())


@pytest.mark.push
def test_a_long_restart_refuses_new_requests(tmp_path: Path) -> None:
    async def ask() -> None:
        limits = ServingLimits(first_pause_s=30.0)
        async with running(scripted_model(tmp_path), limits) as model:
            for _ in range(2):
                await until(lambda: model.state is State.READY)
                held = Listening(model, chat("held"))
                killed(model)
                await until(lambda: model.state is State.RESTARTING)
            with pytest.raises(Unavailable) as caught:
                Listening(model, chat("refused"))
            assert caught.value.state == "restarting"
            assert 25 < caught.value.retry_after < 35
            assert 25 < model.load.wait_s < 35
            held.cancel()

    asyncio.run(ask())


async def opened(model: ModelProcess) -> None:
    try:
        await model.start()
    finally:
        assert model.state is State.FAILED
        await model.close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the engine's process ended while it opened the model: SIGKILL"),
        ("raise SystemExit(7)", "the engine's process ended while it opened the model: exit status 7"),
        (
            "import os; os.write(1, b'0' * 9 + b'{}')",
            "the engine's process sent an invalid message: a message of 3,472,328,296,227,680,304 bytes; the limit is",
        ),
        (
            "import os; os.write(1, bytes(7) + bytes([2]) + b'{}'); input()",
            "the engine's process sent an invalid message",
        ),
    ],
)
def test_a_broken_process_fails_to_start(tmp_path: Path, command: str, words: str) -> None:
    model = ModelProcess(scripted_model(tmp_path), command=[sys.executable, "-S", "-c", command])
    with pytest.raises(LlmrunError, match=words):
        asyncio.run(opened(model))


@pytest.mark.push
def test_a_model_that_cannot_be_opened_fails_to_start(tmp_path: Path) -> None:
    invalid = tmp_path / "invalid.json"
    invalid.write_text("[")
    with pytest.raises(UsageError, match="invalid script"):
        asyncio.run(opened(ModelProcess(Open(str(invalid), options={"backend": "scripted"}))))
    with pytest.raises(ModelNotFound):
        asyncio.run(opened(ModelProcess(Open(str(tmp_path / "none.gguf"), options={"backend": "cpu"}))))
    missing = ModelProcess(scripted_model(tmp_path), command=["/no/such/program"])
    with pytest.raises(LlmrunError, match="cannot start the engine's process"):
        asyncio.run(opened(missing))


FRONT = """
import asyncio, sys, json
from pathlib import Path
from tests.support.serving.processes import Listening, chat, hear, scripted_model
from llmrun.serving.processes.model_process import ModelProcess

async def main():
    model = ModelProcess(scripted_model(Path(sys.argv[1]), step_seconds=0.05))
    await model.start()
    asked = [Listening(model, chat("x" * 3000)) for _ in range(4)]
    await asked[0].accepted()
    print(model.pid, flush=True)
    await hear(model, chat("never"))

asyncio.run(main())
"""


@pytest.mark.push
def test_the_process_ends_with_the_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRONT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=commands.environment(), text=True) as front:
        assert front.stdout is not None
        child = psutil.Process(int(front.stdout.readline()))
        helpers = child.children()
        front.kill()
        _, alive = psutil.wait_procs([child, *helpers], timeout=PATIENCE_S)
    assert not alive
