"""Tests of streams that continue after their connection broke."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.serving.exchanges import AnswerId
from tests.support.serving.fake_model import FACTS, FakeModel, text
from tests.support.serving.serve_process import Served, served
from tests.support.serving.servers import HELLO, serving

CHAT = "/v1/chat/completions"
NOISE: dict[str, Any] = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 12, "ignore_eos": True}
ASKED = {"messages": [{"role": "user", "content": "Tell me"}], "stream": True, **NOISE}
AS_RESPONSE = {**{name: value for name, value in NOISE.items() if name != "max_tokens"}, "max_output_tokens": 12}
CALLS: dict[str, dict[str, Any]] = {CHAT: ASKED, "/v1/responses": {"input": "Tell me", "stream": True, **AS_RESPONSE}}


def raw_events(server: Served, body: dict[str, Any], last: str = "", path: str = CHAT) -> list[bytes]:
    headers = {"Last-Event-ID": last} if last else {}
    status, _, received = server.call("POST", path, body, **headers)
    assert status == 200, received
    return received.split(b"\n\n")[:-1]


def id_of(event: bytes) -> str:
    found = re.search(rb"^id: (.+)$", event, re.MULTILINE)
    assert found, event
    return found[1].decode()


def without_costs(event: bytes) -> bytes:
    """Remove what depends on the time that an answer took and on the cache."""
    return re.sub(rb'"(timings|input_tokens_details)":\{[^}]*\}|"completed_at":\d+', b"", event)


@pytest.mark.night
@pytest.mark.parametrize("path", CALLS)
def test_a_stream_continues_after_every_event(path: str) -> None:
    """The seed is random, and the server is another one each time."""
    with served("scripted", "--backend", "scripted") as server:
        events = [*map(without_costs, raw_events(server, CALLS[path], path=path))]
    ids = [id_of(event) for event in events[:-1]]
    assert events[-1] == b"data: [DONE]"
    assert len(set(ids)) == len(ids) > 6
    with served("scripted", "--backend", "scripted") as another:
        for seen in (1, 2, len(ids) // 2, len(ids) - 1, len(ids)):
            rest = raw_events(another, CALLS[path], ids[seen - 1], path)
            assert [*map(without_costs, rest)] == events[seen:]


@pytest.mark.push
def test_ids_of_other_requests_are_refused() -> None:
    with served("scripted", "--backend", "scripted") as server:
        last = id_of(raw_events(server, ASKED)[3])
        for body in ({**ASKED, "max_tokens": 13}, {**ASKED, "seed": 1}):
            status, _, received = server.call("POST", CHAT, body, **{"last-event-id": last})
            assert (status, b"other_stream" in received) == (409, True)
        status, _, received = server.call("POST", CHAT, {**ASKED, "stream": False}, **{"last-event-id": last})
        assert (status, b"only streams can be resumed" in received) == (400, True)


def test_streams_of_one_api_do_not_continue_in_another() -> None:
    """Their events differ, even if both take the same body."""
    model = FakeModel()
    model.facts = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=True))
    body = {**HELLO, "model": "fake", "max_tokens": 9, "stream": True}
    with serving(model) as server:
        last = id_of(server.send("POST", "/v1/messages", body).body.split(b"\n\n")[0])
        statuses = {
            path: server.send("POST", path, body, {"Last-Event-ID": last}).status
            for path in ("/v1/messages", CHAT, "/api/chat")
        }
    assert statuses == {"/v1/messages": 200, CHAT: 409, "/api/chat": 409}


@pytest.mark.parametrize("last", ["7", "x" * 1000, "0" * 24 + "-" + "0" * 8 + "-" + "9" * 10])
def test_malformed_ids_are_refused(last: str) -> None:
    with serving() as server:
        reply = server.send("POST", CHAT, {**HELLO, "stream": True}, {"Last-Event-ID": last})
    assert (reply.status, reply.error["code"]) == (400, "invalid_event_id")


@pytest.mark.parametrize(("invariant", "n", "has_ids"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_only_repeatable_streams_have_ids(invariant: bool, n: int, has_ids: bool) -> None:
    model = FakeModel(lambda number: text("one", "two"))
    model.facts = structs.replace(FACTS, info=replace(FACTS.info, batch_invariant=invariant))
    with serving(model) as server:
        received = server.chat(stream=True, n=n).body
        assert (b"id: " in received) == has_ids
        if not has_ids:
            last = f"{AnswerId.new()}-00000000-1"
            reply = server.send("POST", CHAT, {**HELLO, "stream": True, "n": n}, {"Last-Event-ID": last})
            assert reply.status == 409
