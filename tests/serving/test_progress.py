"""Tests of streams while a prompt is processed: the progress that clients ask for, comments, and events for timers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import Event, ImageProgress, PrefillProgress
from llmrun.serving.options import Limits, ServingOptions
from llmrun.serving.protocol.anthropic.answers import MessageAnswer
from llmrun.serving.protocol.openai.responses import ChatAnswer
from llmrun.serving.protocol.openai_responses.answers import ResponseAnswer
from tests.support.serving.fake_model import FACTS, HOLD, TIMEOUT_S, FakeModel, text
from tests.support.serving.servers import CHAT, HELLO, post, read_until, serving

QUICK_PINGS = ServingOptions(limits=Limits(ping_s=0.05))
PROMPT: list[Event] = [PrefillProgress(0, 5, 9, 2), PrefillProgress(0, 9, 9, 2)]
MESSAGE = {**HELLO, "model": "fake", "max_tokens": 9}
BODIES: Mapping[str, Mapping[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"prompt": "Hello"},
    "/infill": {"input_prefix": "Hello", "input_suffix": ""},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": MESSAGE,
}
CLAUDE_CODE = "claude-cli/2.1.332 (external, cli)"


def answer(*words: str, pause: bool = False) -> list[Any]:
    """Return the events of an answer to a long prompt, of which two tokens were cached."""
    return [*PROMPT, *([HOLD] if pause else []), *text(*words)[1:]]


def model_of(*words: str, pause: bool = False) -> FakeModel:
    made = FakeModel(lambda number: answer(*words, pause=pause))
    made.facts = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=True))
    return made


def events_of(received: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the ID and the JSON of all events of a stream."""
    found = []
    for event in received.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("id", ""), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize("path", BODIES)
def test_progress_begins_at_the_cached_tokens(path: str) -> None:
    with serving(model_of("one")) as server:
        reply = server.send("POST", path, {**BODIES[path], "stream": True, "return_progress": True})
    events = events_of(reply.body)
    told = [(event_id, event["prompt_progress"]) for event_id, event in events if "prompt_progress" in event]
    assert [event_id for event_id, _ in told] == [""] * 3
    counts = [[progress[name] for name in ("total", "cache", "processed")] for _, progress in told]
    assert counts == [[9, 2, 2], [9, 2, 5], [9, 2, 9]]
    assert all(type(progress["time_ms"]) is int for _, progress in told)
    places = [place for place, (_, event) in enumerate(events) if "prompt_progress" in event]
    assert max(places) < len(events) - 2, "progress precedes the text"
    assert "x-llmrun-ignored" not in reply.headers


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_progress_tells_how_long_images_take(path: str) -> None:
    """While images are encoded, the number of processed tokens does not change."""
    images = [ImageProgress(1, 2, 0.0, 12.0), ImageProgress(1, 2, 0.25, 9.1), ImageProgress(2, 2)]
    script = [*(PrefillProgress(0, 5, 9, 2, image=image) for image in images), *answer("one")[1:]]
    with serving(FakeModel(lambda number: script)) as server:
        reply = server.send("POST", path, {**BODIES[path], "stream": True, "return_progress": True})
    told = [event["prompt_progress"] for _, event in events_of(reply.body) if "prompt_progress" in event]
    assert [progress.get("image") for progress in told[-4:]] == [
        {"number": 1, "count": 2, "share": 0.0, "left_ms": 12_000},
        {"number": 1, "count": 2, "share": 0.25, "left_ms": 9100},
        {"number": 2, "count": 2, "share": 0.0},
        None,
    ]
    assert [progress["processed"] for progress in told[-4:]] == [5, 5, 5, 9]


@pytest.mark.parametrize("path", BODIES)
def test_progress_is_sent_only_if_asked_for(path: str) -> None:
    with serving(model_of("one")) as server:
        plain = server.send("POST", path, {**BODIES[path], "stream": True})
        whole = server.send("POST", path, {**BODIES[path], "return_progress": True})
    assert b"prompt_progress" not in plain.body + whole.body
    assert (whole.status, whole.headers.get("x-llmrun-ignored")) == (200, None)


def test_chunks_with_progress_are_those_of_llama_server() -> None:
    with serving(model_of("one")) as server:
        (_, chat), *_ = events_of(server.chat(stream=True, return_progress=True).body)
        body = {**BODIES["/infill"], "stream": True, "return_progress": True}
        (_, infill), *_ = events_of(server.send("POST", "/infill", body).body)
    assert chat["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert (infill["content"], infill["stop"], infill["tokens_evaluated"]) == ("", False, 9)


def test_several_choices_of_a_chat_report_one_prompt() -> None:
    """OpenAI's client fails if the first chunk does not belong to choice 0."""
    with serving(model_of("one")) as server:
        events = events_of(server.chat(stream=True, return_progress=True, n=3).body)
        prompts = {"prompt": ["a", "b"], "stream": True, "return_progress": True}
        texts = events_of(server.send("POST", "/v1/completions", prompts).body)
    indices = [
        [each["choices"][0]["index"] for _, each in found if "prompt_progress" in each] for found in (events, texts)
    ]
    assert (indices[0], sorted(indices[1])) == ([0] * 3, [0] * 3 + [1] * 3)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_streams_with_progress_can_be_resumed(path: str) -> None:
    body = {**BODIES[path], "stream": True, "return_progress": True}
    with serving(model_of("one", "two")) as server:
        events = events_of(server.send("POST", path, body).body)
        numbered = [each for each in events if each[0]]
        plain = [
            each for each in events_of(server.send("POST", path, {**body, "return_progress": False}).body) if each[0]
        ]
        assert len(plain) == len(numbered) > 3, "progress does not change the numbers of events"
        for place, (last, _) in enumerate(numbered, 1):
            again = events_of(server.send("POST", path, body, {"Last-Event-ID": last}).body)
            assert [each for each in again if each[0]] == numbered[place:]


def test_comments_tell_the_progress() -> None:
    with serving(model_of("one", pause=True), QUICK_PINGS) as server:
        line = server.begin_chat(stream=True)
        received = read_until(line, b": processing prompt 9/9\n\n")
        assert b"data:" not in received
        server.release()
        assert b"processing" not in read_until(line, b"[DONE]").partition(b"one")[2]
        line.close()


def test_responses_repeat_an_event_for_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex gives up if no event arrives for some time, and comments do not count."""
    monkeypatch.setattr(ResponseAnswer, "patience_s", lambda self, client: 0.05)
    model = FakeModel(lambda number: [HOLD, *text("one")])
    model.facts = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=True))
    with serving(model, QUICK_PINGS) as server:
        line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        line.request("POST", "/v1/responses", json.dumps({"input": "Hello", "stream": True}))
        stream, received = line.getresponse(), b""
        while received.count(b"event: response.in_progress") < 4:
            received += stream.readline()
        server.release()
        events = events_of(received + stream.read())
        line.close()
    first, *repeated = [event for event_id, event in events if event["type"] == "response.in_progress" and not event_id]
    assert all(event == first for event in repeated)
    assert first["sequence_number"] == 1
    numbers = [event["sequence_number"] for event_id, event in events if event_id]
    assert numbers == [*range(len(numbers))]


@pytest.mark.parametrize("begins", [True, False], ids=["in its prompt", "in the queue"])
def test_claude_code_receives_events_for_its_timer(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of Claude Code do not count pings."""
    patience = MessageAnswer.patience_s
    monkeypatch.setattr(MessageAnswer, "patience_s", lambda self, client: patience(self, client) / 2000)
    model = FakeModel(lambda number: [*(PROMPT if begins else ()), HOLD, *text("one")[not begins :]])
    with serving(model, QUICK_PINGS) as server:
        line = server.connect()
        line.sendall(post("/v1/messages", {**MESSAGE, "stream": True}, User_Agent=CLAUDE_CODE))
        received = read_until(line, b"event: message_delta")
        assert received.count(b"event: message_start") == 1
        server.release()
        received += read_until(line, b"event: message_stop")
        line.close()
    assert received.count(b"event: message_start") == received.count(b"event: content_block_start") == 1
    assert received.count(b'"stop_reason":"end_turn"') == 1


def test_other_clients_receive_only_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM takes every `message_delta` for the end of the answer."""
    patience = MessageAnswer.patience_s
    monkeypatch.setattr(MessageAnswer, "patience_s", lambda self, client: patience(self, client) / 2000)
    with serving(model_of("one", pause=True), QUICK_PINGS) as server:
        line = server.connect()
        line.sendall(post("/v1/messages", {**MESSAGE, "stream": True}))
        received = b""
        while received.count(b"event: ping") < 4:
            received += line.recv(65536)
        line.close()
    assert b"message_delta" not in received


def test_chats_begin_and_repeat_an_empty_chunk_for_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen Code gives up if no chunk arrives for some time, and comments do not count."""
    monkeypatch.setattr(ChatAnswer, "patience_s", lambda self, client: 0.05)
    with serving(model_of("one", pause=True), QUICK_PINGS) as server:
        line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        line.request("POST", CHAT, json.dumps({**HELLO, "stream": True}))
        stream, received = line.getresponse(), b""
        while received.count(b"data: ") < 4:
            received += stream.readline()
        server.release()
        events = events_of(received + stream.read())
        line.close()
        plain = events_of(server.chat(stream=True).body)
    deltas = [(bool(event_id), event["choices"][0]["delta"]) for event_id, event in events]
    assert deltas[:4] == [(True, {"role": "assistant", "content": ""}), *[(False, {"content": ""})] * 3]
    numbered = [delta for has_id, delta in deltas if has_id]
    assert numbered == [event["choices"][0]["delta"] for _, event in plain]
