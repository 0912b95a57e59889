"""Tests with OpenAI's and Anthropic's clients whose prompts take long: events for timers change no answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from llmrun.serving.options import Limits, ServingOptions
from llmrun.serving.protocol.anthropic.answers import MessageAnswer
from llmrun.serving.protocol.openai.responses import ChatAnswer
from llmrun.serving.protocol.openai_responses.answers import ResponseAnswer
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import RunningServer, serving

pytestmark = pytest.mark.clients

STORY: Any = [{"role": "user", "content": "Tell me a story."}]
ASKED = {"return_progress": True}


@pytest.fixture(params=[True, False], ids=["in its prompt", "in the queue"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server that holds each answer for a while, and sends an event for timers every 50 ms."""
    for answer in (MessageAnswer, ResponseAnswer, ChatAnswer):
        monkeypatch.setattr(answer, "patience_s", lambda self, client: 0.05)
    before, *rest = text("one", " two")
    script = [before, HOLD, *rest] if request.param else [HOLD, before, *rest]
    with serving(FakeModel(lambda number: script), ServingOptions(limits=Limits(ping_s=0.05))) as running:
        timer = threading.Timer(0.6, running.release)
        timer.start()
        yield running
        timer.join()


def test_anthropics_client_gets_the_message(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)
    with client.messages.stream(model="fake", max_tokens=9, messages=STORY, extra_body=ASKED) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", "one two")]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 2)
    assert kinds.count("message_start") == 1
    assert kinds.count("message_delta") > 2


def test_openais_client_gets_the_response(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model="fake", input="Hello", extra_body=ASKED) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert (response.output_text, response.status) == ("one two", "completed")
    assert (kinds.count("response.created"), kinds.count("response.in_progress") > 2) == (1, True)


def test_openais_client_gets_the_chat(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(model="fake", messages=STORY) as stream:
        n_chunks = sum(event.type == "chunk" for event in stream)
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "one two")
    assert n_chunks > 5
