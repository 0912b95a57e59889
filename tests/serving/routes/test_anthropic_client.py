"""Tests with the official client of Anthropic: sync, async, streaming, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam

from llmrun.base.errors import BackendCrashed, ContextExceeded, LlmrunError, Overloaded, Unavailable
from llmrun.serving.options import ServingOptions
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import RunningServer, serving

pytestmark = pytest.mark.push

MESSAGES: list[MessageParam] = [{"role": "user", "content": "Hello"}]
ASKED: Any = {"model": "fake", "max_tokens": 5, "messages": MESSAGES}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def client(server: RunningServer, retries: int = 0, key: str = "unused") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=key, max_retries=retries)


def test_the_client_gets_a_message(server: RunningServer) -> None:
    message = client(server).messages.create(**ASKED, extra_body={"temperature": 0.5})
    assert [block.text for block in message.content if block.type == "text"] == ["Hello there"]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 2)
    assert message.id == f"msg_{message._request_id}"


def test_the_client_gets_a_stream(server: RunningServer) -> None:
    kinds = [event.type for event in client(server).messages.create(**ASKED, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    with client(server).messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "Hello there"
        message = stream.get_final_message()
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 2)


def test_the_async_client_gets_messages_at_the_same_time(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="unused") as asking:

            async def one() -> str:
                async with asking.messages.stream(**ASKED) as stream:
                    return await stream.get_final_text()

            return [*await asyncio.gather(*(one() for _ in range(8)))]

    assert asyncio.run(ask()) == ["Hello there"] * 8


def test_the_beta_client_gets_a_message(server: RunningServer) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    betas = ["context-management-2025-06-27"]
    message = client(server).beta.messages.create(**ASKED, betas=betas, context_management=edits)
    assert message.content[0].type == "text"


def test_the_client_counts_tokens_and_lists_models(server: RunningServer) -> None:
    asking = client(server)
    assert asking.messages.count_tokens(model="fake", messages=MESSAGES).input_tokens == 42
    assert [model.display_name for model in asking.models.list()] == ["fake"]
    assert asking.models.retrieve("fake").max_input_tokens == 4096


def test_the_client_skips_pings_and_can_leave() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], HOLD])
    with serving(model) as server:
        stream = client(server).messages.create(**ASKED, stream=True)
        next(iter(stream))
        stream.close()
        model.wait_for("cancelled")


@pytest.mark.parametrize(
    ("refusal", "error", "kind"),
    [
        (ContextExceeded.by_prompt(5000, 4096, hint="x"), anthropic.BadRequestError, "invalid_request_error"),
        (Overloaded("the queue is full"), anthropic.RateLimitError, "rate_limit_error"),
        (Unavailable("loading"), anthropic.APIStatusError, "overloaded_error"),
        (BackendCrashed("x"), anthropic.InternalServerError, "api_error"),
    ],
)
def test_errors_are_those_of_the_client(refusal: LlmrunError, error: type[Exception], kind: str) -> None:
    model = FakeModel()
    model.refusal = refusal
    with serving(model) as server, pytest.raises(error) as caught:
        client(server).messages.create(**ASKED)
    assert isinstance(caught.value, anthropic.APIStatusError)
    assert caught.value.type == kind
    assert caught.value.request_id


def test_the_client_recognizes_a_wrong_model_and_key(server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude-opus-4-8"):
        client(server).messages.create(**{**ASKED, "model": "claude-opus-4-8"})
    with pytest.raises(anthropic.NotFoundError):
        client(server).models.retrieve("claude-opus-4-8")
    key = "a-long-key-for-tests"
    with serving(options=ServingOptions(keys=(key,))) as locked:
        with pytest.raises(anthropic.AuthenticationError):
            client(locked).messages.create(**ASKED)
        assert client(locked, key=key).messages.create(**ASKED).role == "assistant"


def test_the_client_recognizes_an_error_in_a_stream() -> None:
    with serving(FakeModel(lambda number: [*text("one")[:2], BackendCrashed("x")])) as server:
        with pytest.raises(anthropic.APIStatusError, match="crashed") as caught:
            list(client(server).messages.create(**ASKED, stream=True))
        assert caught.value.type == "api_error"


def test_the_client_waits_and_retries_when_the_queue_is_full() -> None:
    model = FakeModel()
    model.refusal = Overloaded("the queue is full", retry_after=0.05)
    with serving(model) as server:

        def recover() -> None:
            model.refusal = None

        server.loop.call_soon_threadsafe(server.loop.call_later, 0.02, recover)
        message = client(server, retries=5).messages.create(**ASKED)
        assert message.content
