"""Tests of server-sent events: their form, pings, errors after the headers, and choices that fail together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from llmrun.base.errors import BackendCrashed, Overloaded, Unavailable
from llmrun.serving.options import Limits, ServingOptions
from tests.support.serving.fake_model import HOLD, FakeModel, text
from tests.support.serving.servers import Reply, eventually, read_until, serving

QUICK_PINGS = ServingOptions(limits=Limits(ping_s=0.05))


def events_of(reply: Reply) -> list[Any]:
    """Return the data of all events. [DONE] is a string."""
    assert reply.body.endswith(b"\n\n")
    data = [line.removeprefix("data: ") for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_a_stream_has_chunks_and_ends_with_done() -> None:
    with serving(FakeModel(lambda number: text("Hällo", " 👋"))) as server:
        reply = server.chat(stream=True)
    *chunks, last = events_of(reply)
    assert (reply.status, last) == (200, "[DONE]")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hällo 👋"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-store", "no")
    assert chunks[0]["id"] == f"chatcmpl-{reply.headers['x-request-id']}"


def test_silence_is_filled_with_pings_while_queued() -> None:
    model = FakeModel(lambda number: [HOLD, *text("late")])
    with serving(model, QUICK_PINGS) as server:
        line = server.begin_chat(stream=True)
        received = read_until(line, b": ping\n\n")
        assert b"200 OK" in received
        assert b"data:" not in received
        server.release()
        assert b"late" in read_until(line, b"[DONE]")
        line.close()


def test_silence_is_filled_with_pings_between_tokens() -> None:
    first, *rest = text("one", "two")[1:]
    model = FakeModel(lambda number: [first, HOLD, *rest])
    with serving(model, QUICK_PINGS) as server:
        line = server.begin_chat(stream=True)
        assert b"one" in read_until(line, b": ping\n\n: ping\n\n".partition(b"\n\n: ")[0])
        server.release()
        read_until(line, b"[DONE]")
        line.close()


def test_refused_requests_have_a_status_even_if_streamed() -> None:
    model = FakeModel()
    model.refusal = Overloaded("the queue is full", retry_after=7.2)
    with serving(model) as server:
        reply = server.chat(stream=True)
    assert (reply.status, reply.error["code"]) == (429, "server_overloaded")
    assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("8", "true")


def test_an_error_after_the_headers_is_the_last_event() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], BackendCrashed("secret path /home/me/model.gguf")])
    with serving(model) as server:
        reply = server.chat(stream=True)
        eventually(lambda: any("failed" in line for line in server.log))
    *_, last = events_of(reply)
    assert reply.status == 200
    assert last["error"]["type"] == "server_error"
    assert b"[DONE]" not in reply.body
    assert b"/home/me" not in reply.body


def test_an_error_of_a_whole_answer_is_a_status() -> None:
    model = FakeModel(lambda number: [*text("one")[:2], Unavailable("restarting", state="restarting")])
    with serving(model) as server:
        reply = server.chat()
    assert (reply.status, reply.error["code"]) == (503, "restarting")


def test_if_one_choice_fails_all_are_cancelled() -> None:
    model = FakeModel(lambda number: [BackendCrashed("x")] if number % 3 == 1 else [HOLD])
    with serving(model) as server:
        assert server.chat(n=3).status == 500
        model.wait_for("cancelled", 2)  # the third one has failed
        assert server.chat(n=3, stream=True).status == 200


def test_choices_are_asked_at_the_same_time() -> None:
    model = FakeModel(lambda number: [HOLD, *text(f"answer {number}")])
    with serving(model) as server:
        line = server.begin_chat(n=4)
        model.wait_for("held", 4)
        server.release()
        received = read_until(line, b"}}")
        line.close()
    body = json.loads(received.partition(b"\r\n\r\n")[2])
    assert [choice["message"]["content"] for choice in body["choices"]] == [f"answer {n}" for n in range(4)]


def test_a_refused_choice_cancels_the_accepted_ones() -> None:
    model = FakeModel(lambda number: [HOLD])
    with serving(model) as server:
        asked = model.ask

        def refuse_second(request: Any, news: asyncio.Event) -> Any:
            if len(model.asked) == 1:
                raise Overloaded("full")
            return asked(request, news)

        model.ask = refuse_second  # type: ignore[method-assign]
        assert server.chat(n=2).status == 429
        model.wait_for("cancelled")
