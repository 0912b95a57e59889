"""Tests with the official client of OpenAI: sync, async and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from llmrun.base.errors import BackendCrashed, Overloaded
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import RunningServer, serving

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def client(server: RunningServer, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=retries)


def test_the_client_gets_an_answer(server: RunningServer) -> None:
    raw = client(server).chat.completions.with_raw_response.create(model="fake", messages=MESSAGES, seed=3)
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello there"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert raw.headers["x-request-id"] in answer.id
    assert [model.id for model in client(server).models.list()] == ["fake"]


def test_the_client_gets_a_stream_with_usage(server: RunningServer) -> None:
    chunks = list(
        client(server).chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "Hello there"
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [2]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"


def test_the_async_client_gets_answers_at_the_same_time(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused") as asking:
            answers = [asking.completions.create(model="fake", prompt="x") for _ in range(8)]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == ["Hello there"] * 8


def test_the_client_recognizes_an_error_in_a_stream() -> None:
    with serving(FakeModel(lambda number: [*text("one")[:2], BackendCrashed("x")])) as server:
        stream = client(server).chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="crashed"):
            list(stream)


def test_the_client_skips_pings_and_can_leave() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], HOLD])
    with serving(model) as server:
        stream = client(server).chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        next(iter(stream))
        stream.close()
        model.wait_for("cancelled")


def test_the_client_waits_and_retries_when_the_queue_is_full() -> None:
    model = FakeModel()
    model.refusal = Overloaded("the queue is full", retry_after=0.05)
    with serving(model) as server:
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            client(server).chat.completions.create(model="fake", messages=MESSAGES)

        def recover() -> None:
            model.refusal = None

        server.loop.call_soon_threadsafe(server.loop.call_later, 0.02, recover)
        answer = client(server, retries=5).chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello there"


def test_the_client_recognizes_a_wrong_model(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client(server).chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
