"""Tests of /v1/responses over HTTP, also with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest

from llmrun.base.errors import BackendCrashed, Overloaded
from llmrun.engine.requests import Failed
from llmrun.serving.protocol.openai_responses.answers import ResponseAnswer
from llmrun.serving.protocol.openai_responses.objects import ResponseEvent
from llmrun.serving.streams import Stream
from tests.support.protocol.response_answers import official_event, official_response
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import Reply, RunningServer, eventually, serving

RESPONSES = "/v1/responses"
STORED = "this server stores no responses"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)


def ask(server: RunningServer, **fields: Any) -> Reply:
    return server.send("POST", RESPONSES, {"input": "Hello", **fields})


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    """Return the type and the data of each event."""
    found = []
    for block in reply.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], json.loads(fields["data"])))
    return found


@pytest.mark.parametrize("path", [RESPONSES, "/responses"])
def test_calls_are_answered(server: RunningServer, path: str) -> None:
    reply = server.send("POST", path, {"model": "fake", "input": "Hello", "invented": 1})
    answer = official_response(reply.json)
    assert (reply.status, answer.output_text, answer.status) == (200, "Hello there", "completed")
    assert reply.json["id"] == f"resp_{reply.headers['x-request-id']}"
    assert reply.headers["x-llmrun-ignored"] == "invented"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2


def test_a_stream_has_typed_events_and_ends_with_done(server: RunningServer) -> None:
    reply = ask(server, stream=True)
    events = events_of(reply)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert [kind for kind, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    for _, data in events:
        official_event(data)
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "Hello there"


def test_errors_have_openais_form(server: RunningServer) -> None:
    for fields, status, param in (
        ({"temperature": "hot"}, 400, "temperature"),
        ({"store": True}, 400, "store"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"model": "gpt-5"}, 404, "model"),
    ):
        reply = ask(server, **fields)
        assert (reply.status, reply.error["param"]) == (status, param)
    assert STORED in ask(server, store=True).error["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_stored_responses_are_not_found(server: RunningServer, method: str, path: str) -> None:
    reply = server.send(method, f"{RESPONSES}/resp_1{path}")
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert STORED in reply.error["message"]
    with pytest.raises(openai.NotFoundError, match=STORED):
        client(server).responses.retrieve("resp_1")


def test_a_failure_after_the_headers_ends_the_stream() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], BackendCrashed("secret path /home/me/model.gguf")])
    with serving(model) as server:
        reply = ask(server, stream=True)
        eventually(lambda: any("failed" in line for line in server.log))
        with pytest.raises(openai.APIError, match="crashed"):
            list(client(server).responses.create(model="fake", input="Hello", stream=True))
        whole = ask(server)
    *_, (_, told), (_, failed) = events_of(reply)
    assert (told["type"], failed["type"]) == ("error", "response.failed")
    assert failed["response"]["output"][0]["content"][0]["text"] == "one"
    assert b"[DONE]" not in reply.body
    assert b"/home/me" not in reply.body
    assert (whole.status, whole.error["code"]) == (500, "backend_crashed")


def test_a_failure_before_the_first_event_ends_a_whole_stream() -> None:
    with serving(FakeModel(lambda number: [BackendCrashed("x")])) as server:
        events = events_of(ask(server, stream=True))
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    assert kinds == ["created", "in_progress", "error", "failed"]


def test_text_that_arrives_together_with_a_failure_is_sent() -> None:
    with serving(FakeModel(lambda number: [*text("one")[:2], Failed(0, BackendCrashed("x"))])) as server:
        events = events_of(ask(server, stream=True))
    assert [event["sequence_number"] for _, event in events] == [*range(len(events))]
    assert [kind for kind, _ in events][-3:] == ["response.output_text.delta", "error", "response.failed"]


def test_refused_calls_have_a_status_even_if_streamed() -> None:
    model = FakeModel()
    model.refusal = Overloaded("the queue is full", retry_after=7.2)
    with serving(model) as server:
        reply = ask(server, stream=True)
    assert (reply.status, reply.headers["retry-after"]) == (429, "8")


def test_the_client_gets_answers(server: RunningServer) -> None:
    asking = client(server)
    answer = asking.responses.create(model="fake", input="Hello", instructions="Be brief.", store=False)
    assert (answer.output_text, answer.instructions) == ("Hello there", "Be brief.")
    streamed = [*asking.responses.create(model="fake", input="Hello", stream=True)]
    assert "".join(event.delta for event in streamed if event.type == "response.output_text.delta") == "Hello there"
    with asking.responses.stream(model="fake", input="Hello") as stream:
        assert stream.get_final_response().output_text == "Hello there"


def test_the_async_client_gets_answers_at_the_same_time(server: RunningServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused") as asking:
            answers = [asking.responses.create(model="fake", input="x") for _ in range(8)]
            texts = [answer.output_text for answer in await asyncio.gather(*answers)]
            async with asking.responses.stream(model="fake", input="x") as stream:
                return [*texts, (await stream.get_final_response()).output_text]

    assert asyncio.run(run()) == ["Hello there"] * 9


def test_a_client_that_leaves_cancels_the_answer() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], HOLD])
    with serving(model) as server:
        stream = client(server).responses.create(model="fake", input="Hello", stream=True)
        next(iter(stream))
        stream.close()
        model.wait_for("cancelled")


@pytest.mark.push
@pytest.mark.parametrize(("n_words", "thread"), [(3, "same"), (1000, "other")])
def test_the_end_of_a_long_stream_is_written_off_the_loop(
    n_words: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last events repeat the whole answer, with its log-probabilities."""
    written: list[str] = []

    def finish(self: ResponseAnswer) -> list[ResponseEvent]:
        written.append(threading.current_thread().name)
        return known(self)

    known = ResponseAnswer.finish
    monkeypatch.setattr(ResponseAnswer, "finish", finish)
    with serving(FakeModel(lambda number: text(*["é "] * n_words))) as server:
        loop: list[str] = []
        server.call(lambda: loop.append(threading.current_thread().name))
        events = events_of(ask(server, stream=True))
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "é " * n_words
    assert (written == loop) == (thread == "same")


@pytest.mark.parametrize("length", [10, 100_000])
def test_events_that_repeat_a_large_request_are_written_off_the_loop(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def framed(self: Stream, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        written.append(threading.current_thread().name)
        return known(self, chunks)

    known = Stream._framed
    monkeypatch.setattr(Stream, "_framed", framed)
    with serving() as server:
        loop: list[str] = []
        server.call(lambda: loop.append(threading.current_thread().name))
        events = events_of(ask(server, stream=True, instructions="x" * length))
    assert len(events[0][1]["response"]["instructions"]) == len(events[-1][1]["response"]["instructions"]) == length
    assert ([written[0], written[-1]] == loop * 2) == (length == 10)
    assert written[1:-1] == loop * len(written[1:-1])
