"""Tests of a served model in a process that stays alive. All but the last tests share one process."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from msgspec import structs

from llmrun.backends.scripted import HIDDEN_SIZE, ScriptedBackend
from llmrun.base.errors import LlmrunError, Overloaded, Unavailable, UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.child.messages import Embed, Embedded
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Finished, PrefillProgress, Request, TextDelta, TextPrompt, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.served_model import ServedModel, State
from llmrun.serving.processes.supervisor import ServingLimits
from tests.support.engine.pictures import ask, plain, png
from tests.support.serving.processes import Heard, Listening, chat, hear, heard, noise, running, scripted_model, until

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]
STEP_S = 0.002


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def model(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelProcess]:
    made = ModelProcess(scripted_model(tmp_path_factory.mktemp("model"), step_seconds=STEP_S))
    assert made.state is State.LOADING
    assert made.facts is None
    with pytest.raises(Unavailable):
        Listening(made, chat("too early"))
    runner.run(made.start())
    yield made
    runner.run(made.close())


def directly(*requests: Request) -> list[Heard]:
    """Return what an engine in this process answers, one request at a time."""
    with Engine(ScriptedBackend(max_sequences=4)) as engine:
        return [heard(list(engine.generate(request))) for request in requests]


@pytest.mark.push
def test_answers_are_those_of_the_engine(runner: asyncio.Runner, model: ModelProcess) -> None:
    requests = [
        chat("Hello, wörld! 👋"),
        noise(7),
        Request(TextPrompt("Once"), max_tokens=30, stop=("rdlu",), sampling=SamplingParams(temperature=0.0)),
        Request(TokenPrompt([104, 105]), max_tokens=5, sampling=SamplingParams(logit_bias={101: -float("inf")})),
    ]
    for request, expected in zip(requests, directly(*requests), strict=True):
        found = runner.run(hear(model, request))
        assert (found.pieces, found.finished.reason) == (expected.pieces, expected.finished.reason)
        assert found.finished.stop == expected.finished.stop


@pytest.mark.push
def test_many_requests_at_once_have_the_same_answers(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def all_of_them() -> list[Heard]:
        return await asyncio.gather(*(hear(model, noise(seed)) for seed in range(60)))

    found = runner.run(all_of_them())
    assert [one.pieces for one in found] == [one.pieces for one in directly(*map(noise, range(60)))]


@pytest.mark.push
def test_acceptance_comes_before_the_events(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def ask() -> list[Any]:
        asked = Listening(model, Request(TextPrompt("hello"), max_tokens=3, logprobs=1))
        return [await asked.accepted(), await asked.accepted(), *[event async for event in asked]]

    first, again, *events = runner.run(ask())
    assert first is again
    assert first.prompt_tokens == 6
    assert isinstance(events[0], PrefillProgress)
    assert isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [len(delta.logprobs[0].top) for delta in deltas] == [1, 1, 1]
    assert deltas[0].logprobs[0].chosen.text == deltas[0].text.encode()


@pytest.mark.parametrize(
    "request_", [Request(TokenPrompt([10**6])), Request(TextPrompt("x"), stop=("",)), Request(TokenPrompt([]))]
)
def test_invalid_requests_fail(runner: asyncio.Runner, model: ModelProcess, request_: Request) -> None:
    async def ask() -> None:
        asked = Listening(model, request_)
        with pytest.raises(UsageError):
            await asked.accepted()
        with pytest.raises(UsageError):
            await anext(aiter(asked))

    runner.run(ask())


def test_a_request_that_is_not_json_is_refused(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def ask() -> None:
        nested: Any = "x"
        for _ in range(100_000):
            nested = [nested]
        for content in (object(), 1j, nested):
            with pytest.raises(UsageError, match="request cannot be represented in JSON"):
                Listening(model, Request(ChatPrompt([{"role": "user", "content": content}])))

    runner.run(ask())


@pytest.mark.parametrize("n_events", [0, 1, 2, 10])
def test_a_cancelled_request_ends_with_finished(runner: asyncio.Runner, model: ModelProcess, n_events: int) -> None:
    async def ask() -> Heard:
        asked = Listening(model, chat("x" * 3000))
        events = []
        if n_events == 0:
            asked.cancel()
        async for event in asked:
            events.append(event)
            if len(events) == n_events:
                asked.cancel()
                asked.cancel()
        asked.cancel()
        return heard(events)

    found = runner.run(ask())
    assert found.finished.reason is FinishReason.CANCELLED
    assert len(found.pieces) < 200
    assert runner.run(hear(model, chat("next"))).text == "You said: next"


def test_a_request_in_the_queue_can_be_cancelled(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def ask() -> Heard:
        others = [Listening(model, chat("x" * 3000)) for _ in range(4)]
        await until(lambda: model.load.running == 4)
        waiting = Listening(model, chat("waiting"))
        await waiting.accepted()
        waiting.cancel()
        found = heard([event async for event in waiting])
        for asked in others:
            asked.cancel()
        await until(lambda: model.load.running == 0)
        return found

    found = runner.run(ask())
    assert (found.text, found.finished.reason) == ("", FinishReason.CANCELLED)


@pytest.mark.push
def test_a_client_that_stops_reading_cancels(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def close_the_iterator() -> None:
        async with aclosing(aiter(Listening(model, chat("x" * 3000)))) as events:
            await anext(events)
        await until(lambda: model.load.running == 0)

    async def cancel_the_task() -> None:
        task = asyncio.create_task(hear(model, chat("x" * 3000)))
        await until(lambda: model.load.running == 1)
        task.cancel()
        await until(lambda: model.load.running == 0)

    for leave in (close_the_iterator, cancel_the_task):
        generated = model.load.generated_tokens
        runner.run(leave())
        assert model.load.generated_tokens < generated + 3000


def test_tokens_and_their_bytes(runner: asyncio.Runner, model: ModelProcess) -> None:
    tokens = runner.run(model.tokenize("é<|im_end|>", add_special=False, parse_special=True))
    assert tokens == [0xC3, 0xA9, 259]
    assert runner.run(model.detokenize(tokens[:2])) == "é".encode()
    assert runner.run(model.spell(tokens)) == [b"\xc3", b"\xa9", b"<|im_end|>"]
    with pytest.raises(UsageError, match="no such token"):
        runner.run(model.detokenize([260]))


def test_prompts_are_counted(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def ask() -> tuple[int, int]:
        request = chat("How many?")
        asked = model.ask(request, asyncio.Event())
        accepted = await asked.accepted()
        asked.cancel()
        return await model.count_prompt(request), accepted.prompt_tokens

    counted, prompt_tokens = runner.run(ask())
    assert counted == prompt_tokens


def test_the_facts_describe_the_model(runner: asyncio.Runner, model: ModelProcess) -> None:
    facts = model.facts
    assert facts is not None
    assert (facts.name, facts.info.max_sequences, facts.info.backend) == ("a-model", 4, "scripted")
    assert (facts.takes_chats, facts.takes_tools, facts.info.metadata) == (True, False, {})
    assert facts.kv_tokens == 4 * facts.info.context_size
    assert facts.fingerprint.startswith("fp_")
    served: ServedModel = model
    assert served.state is State.READY


@pytest.mark.push
def test_the_load_counts_requests_and_tokens(runner: asyncio.Runner, model: ModelProcess) -> None:
    async def ask() -> None:
        before = model.load
        tasks = [asyncio.create_task(hear(model, chat("x" * 100))) for _ in range(10)]
        await until(lambda: (model.load.running, model.load.waiting) == (4, 6))
        await asyncio.gather(*tasks)
        await until(lambda: model.load.generated_tokens >= before.generated_tokens + 10 * 111)
        load = model.load
        assert (load.running, load.waiting, load.restarts) == (0, 0, 0)
        assert load.steps > before.steps
        assert load.beat_age_s < 10
        assert load.free_tokens > 0

    runner.run(ask())


def test_the_process_has_its_own_session(model: ModelProcess) -> None:
    """Otherwise, Ctrl-C in the terminal would interrupt its answers."""
    if sys.platform == "win32":
        pytest.skip("needs sessions")
    assert model.pid is not None
    assert os.getsid(model.pid) == model.pid != os.getsid(0)


@pytest.mark.push
def test_an_idle_process_does_not_poll(runner: asyncio.Runner, model: ModelProcess) -> None:
    process = psutil.Process(model.pid)

    async def used() -> float:
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(0.5)
        return sum(process.cpu_times()[:2]) - before

    assert runner.run(used()) < 0.1


@pytest.mark.push
def test_limits_of_the_queue_and_of_slow_clients(tmp_path: Path) -> None:
    async def ask() -> None:
        limits = ServingLimits(max_queue=3, queue_bytes=20_000, unread_bytes=20_000)
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), limits) as model:
            slow = Listening(model, chat("x" * 2000))
            events = aiter(slow)
            await anext(events)
            await until(lambda: slow.served.over)
            with pytest.raises(LlmrunError, match="the client reads too slowly"):
                [event async for event in events]
            await until(lambda: model.load.running == 0)
            others = []
            for _ in range(4):
                others.append(asyncio.create_task(hear(model, chat("y" * 3000))))
                await until(lambda: model.load.running == len(others))
            waiting = [Listening(model, chat("z" * 9000)) for _ in range(2)]
            with pytest.raises(Overloaded, match="the waiting requests have"):
                Listening(model, chat("z" * 9000))
            waiting.append(Listening(model, chat("short")))
            with pytest.raises(Overloaded, match="the queue is full: 3 requests") as caught:
                Listening(model, chat("short"))
            assert caught.value.retry_after >= 1.0
            for asked in waiting[:2]:
                asked.cancel()
            for task in others:
                task.cancel()
            assert heard([event async for event in waiting[2]]).text == "You said: short"

    asyncio.run(ask())


@pytest.mark.push
def test_one_of_several_keys_cannot_fill_the_queue(tmp_path: Path) -> None:
    async def ask() -> None:
        limits = ServingLimits(max_queue=4, tenants=2)
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), limits) as model:
            assert model.most_requests == 2
            others = []
            for _ in range(4):
                others.append(asyncio.create_task(hear(model, chat("y" * 3000))))
                await until(lambda: model.load.running == len(others))
            greedy = [Listening(model, structs.replace(chat("short"), tenant="greedy")) for _ in range(2)]
            with pytest.raises(Overloaded, match="2 requests with this API key are waiting"):
                Listening(model, structs.replace(chat("short"), tenant="greedy"))
            modest = Listening(model, structs.replace(chat("short"), tenant="modest"))
            for task in others:
                task.cancel()
            for asked in (*greedy, modest):
                assert heard([event async for event in asked]).text == "You said: short"

    asyncio.run(ask())


@pytest.mark.push
def test_one_of_several_keys_cannot_fill_the_queue_of_calls(tmp_path: Path) -> None:
    async def ask() -> None:
        limits = ServingLimits(max_queue=4, tenants=2, queue_bytes=20_000)
        async with running(scripted_model(tmp_path, step_seconds=0.05), limits) as model:

            def embed(tenant: str, n: int = 400) -> asyncio.Task[Embedded]:
                return asyncio.create_task(model.embed(Embed((TextPrompt("x" * n),), truncate=True, tenant=tenant)))

            calls = [embed("greedy") for _ in range(2)]
            await until(lambda: model.load.running == 2)
            with pytest.raises(Overloaded, match="2 requests with this API key are waiting"):
                await embed("greedy")
            calls.append(embed("modest", 6000))
            await until(lambda: model.load.running == 3)
            with pytest.raises(Overloaded, match="the waiting requests with this API key have"):
                await embed("modest", 6000)
            assert [found.tokens for found in await asyncio.gather(*calls[:2])] == [[401]] * 2
            calls[2].cancel()
            await until(lambda: model.load.running == 0)

    asyncio.run(ask())


@pytest.mark.push
@pytest.mark.parametrize("tenants", [1, 2])
def test_cancelled_requests_and_calls_free_their_places_at_once(tmp_path: Path, tenants: int) -> None:
    """A client may repeat a request before the engine has finished the current step."""

    async def ask() -> None:
        limits = ServingLimits(max_queue=1, tenants=tenants, queue_bytes=20_000)
        async with running(scripted_model(tmp_path, step_seconds=STEP_S), limits) as model:
            others = []
            for _ in range(4):
                others.append(asyncio.create_task(hear(model, chat("y" * 3000))))
                await until(lambda: model.load.running == len(others))
            process = psutil.Process(model.pid)
            process.suspend()
            for _ in range(3):
                Listening(model, chat("z" * 6000)).cancel()
            last = Listening(model, chat("short"))
            with pytest.raises(Overloaded):
                Listening(model, chat("short"))
            call = asyncio.create_task(model.count_prompt(chat("short")))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await model.tokenize("x", add_special=False, parse_special=False)
            call.cancel()
            await asyncio.sleep(0)
            again = asyncio.create_task(model.count_prompt(chat("short")))
            await asyncio.sleep(0)
            process.resume()
            for task in others:
                task.cancel()
            assert heard([event async for event in last]).text == "You said: short"
            assert await again > 0

    asyncio.run(ask())


@pytest.mark.push
def test_cancelled_requests_cannot_fill_the_memory_of_the_process(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path), ServingLimits(max_queue=1, tenants=2)) as model:
            process = psutil.Process(model.pid)
            process.suspend()
            for _ in range(8):
                Listening(model, structs.replace(chat("x"), tenant="hostile")).cancel()
            with pytest.raises(Overloaded, match="8 cancelled requests have not ended"):
                Listening(model, structs.replace(chat("x"), tenant="hostile"))
            other = Listening(model, structs.replace(chat("hello"), tenant="other"))
            process.resume()
            assert heard([event async for event in other]).text == "You said: hello"
            await until(lambda: not model.load.waiting)
            assert (await hear(model, structs.replace(chat("x"), tenant="hostile"))).text == "You said: x"

    asyncio.run(ask())


@pytest.mark.push
def test_many_results_come_in_parts(runner: asyncio.Runner, model: ModelProcess) -> None:
    texts = [f"{number} " * (number % 7) for number in range(2048)]
    found = runner.run(model.embed(Embed([*map(TextPrompt, texts)])))
    assert found.tokens == [1 + len(text) for text in texts]
    vectors = np.frombuffer(found.data, np.float32).reshape(2048, HIDDEN_SIZE)
    for number in (0, 1000, 2047):
        alone = runner.run(model.embed(Embed([TextPrompt(texts[number])])))
        assert alone.data == vectors[number].tobytes()


@pytest.mark.push
def test_calls_of_clients_that_left_count_until_they_are_forgotten(tmp_path: Path) -> None:
    """Otherwise, a client that leaves at once could fill the memory of the process."""

    large = Embed(tuple(TextPrompt(f"{number} " + "x" * 500) for number in range(200)))

    async def ask() -> None:
        async with running(scripted_model(tmp_path), ServingLimits(max_queue=8)) as model:
            process = psutil.Process(model.pid)
            process.suspend()  # it forgets no call
            ended = []
            for _ in range(12):
                call = asyncio.create_task(model.embed(large))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises((asyncio.CancelledError, Overloaded)) as caught:
                    await call
                ended.append(caught.type)
            process.resume()
            assert ended == [asyncio.CancelledError] * 8 + [Overloaded] * 4
            await until(lambda: model.load.running == 0)
            assert (await model.embed(Embed((TextPrompt("x"),)))).tokens == [2]

    asyncio.run(ask())


@pytest.mark.night
def test_draining_finishes_embeddings(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=0.02)) as model:
            call = asyncio.create_task(model.embed(Embed((TextPrompt("x" * 1000),) * 8)))
            await until(lambda: model.load.running == 1)
            draining = asyncio.create_task(model.drain(30.0))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await model.embed(Embed((TextPrompt("late"),)))
            await draining
            assert (await call).tokens == [1001] * 8
        async with running(scripted_model(tmp_path, step_seconds=0.05)) as model:
            call = asyncio.create_task(model.embed(Embed((TextPrompt("x" * 1000),) * 500)))
            await until(lambda: model.load.running == 1)
            await model.drain(0.1)
            with pytest.raises(Unavailable):
                await call

    asyncio.run(ask())


@pytest.mark.push
def test_draining_finishes_what_runs(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S)) as model:
            long = asyncio.create_task(hear(model, chat("x" * 6000)))
            text = "short" * 20  # long enough to run until the other requests are there
            short = asyncio.create_task(hear(model, chat(text)))
            await until(lambda: model.load.running == 2)
            more = [asyncio.create_task(hear(model, noise(2, 100))) for _ in range(2)]
            await until(lambda: model.load.running == 4)
            waiting = Listening(model, chat("waiting"))
            await waiting.accepted()
            draining = asyncio.create_task(model.drain(2.0))
            await asyncio.sleep(0)
            assert model.state is State.DRAINING
            with pytest.raises(Unavailable) as caught:
                await anext(aiter(waiting))
            assert caught.value.state == "draining"
            with pytest.raises(Unavailable):
                Listening(model, chat("late"))
            await draining
            assert (await short).text == f"You said: {text}"
            assert len(await asyncio.gather(*more)) == 2
            with pytest.raises(Unavailable):
                await long

    asyncio.run(ask())


@pytest.mark.push
def test_closing_ends_the_process_and_its_requests(tmp_path: Path) -> None:
    async def ask() -> None:
        async with running(scripted_model(tmp_path, step_seconds=STEP_S)) as model:
            pid = model.pid
            asked = asyncio.create_task(hear(model, chat("x" * 3000)))
            await model.tokenize("x", add_special=False, parse_special=False)
            await until(lambda: model.load.running == 1)
            await model.close()
            await model.close()
            with pytest.raises(Unavailable):
                await asked
            with pytest.raises(Unavailable):
                await model.tokenize("x", add_special=False, parse_special=False)
            assert pid is not None
            assert not psutil.pid_exists(pid)

    asyncio.run(ask())


@pytest.mark.push
def test_long_prompts_are_in_the_log_and_the_load(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.serving.processes.model_process._LOG_S", 0.3)
    notes, loads = list[str](), list[tuple[int, int]]()
    slow = ModelProcess(scripted_model(tmp_path, step_seconds=0.25), prompts=notes.append)

    async def run() -> None:
        await slow.start()
        async for event in Listening(slow, Request(TextPrompt("x" * 1500), max_tokens=1)):
            loads.append((slow.load.processing_tokens, slow.load.remaining_tokens))
            assert isinstance(event, PrefillProgress) or loads[-1] == (0, 0)
        await slow.close()

    runner.run(run())
    assert {processing for processing, _ in loads} == {1501, 0}
    assert [remaining for _, remaining in loads] == sorted((remaining for _, remaining in loads), reverse=True)
    assert 2 <= len(notes) <= 7
    for note in notes:
        assert re.fullmatch(r"processing prompt: [\d,]+ of 1,501 tokens \([\d.]+%\), about \d+ (s|min) left", note), (
            note
        )


@pytest.mark.push
def test_long_images_are_in_the_log(runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile, the prompt makes no progress, and a client that leaves stops the encoder."""
    monkeypatch.setattr("llmrun.serving.processes.model_process._LOG_S", 0.3)
    projector, notes = {"encode_tiles": 1000, "tile_seconds": 0.02, "expected_seconds": 20.0}, list[str]()
    process = ModelProcess(scripted_model(tmp_path, projector=projector), prompts=notes.append)

    async def run() -> None:
        await process.start()
        asked = Listening(process, ask([png(plain(64, 64)), "?"]))
        async for event in asked:
            if isinstance(event, PrefillProgress) and len(notes) > 2:
                asked.cancel()
        await until(lambda: process.load.running == 0)
        assert (await hear(process, chat("hello"))).text == "You said: hello"
        await process.close()

    runner.run(run())
    for note in notes:
        assert re.fullmatch(r"reading the image(, about \d+ s|: \d+%, about \d+ s left)", note), note


@pytest.mark.push
@pytest.mark.parametrize("room", [1 << 30, 0])
def test_closing_saves_the_prompts_of_running_requests(tmp_path: Path, room: int) -> None:
    """Notes about saving are shown, although the requests have ended."""
    folder, notes = tmp_path / "prefixes", list[str]()

    async def ask() -> None:
        opening = scripted_model(tmp_path, step_seconds=STEP_S)
        options = {**opening.options, "saves_state": True}
        model = ModelProcess(
            structs.replace(opening, options=options, saved_prefixes=str(folder), state_bytes=room), note=notes.append
        )
        await model.start()
        asked = asyncio.create_task(hear(model, chat("x" * 1200)))
        await until(lambda: model.load.generated_tokens > 0)
        await model.close()
        with pytest.raises(Unavailable):
            await asked

    asyncio.run(ask())
    assert len([*folder.glob("*.kv")]) == (3 if room else 0)
    assert notes == ([] if room else ["prefixes are not saved: another chunk exceeds state_gb or the free disk space"])
