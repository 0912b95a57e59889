"""Tests of streams that another upstream continues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.servers.hostile_server import DONE, HELLO, said
from tests.support.serving.fake_upstream import ANSWER, MODEL, chunked, refusal, whole
from tests.support.serving.fronts import behind, last_line, numbered, posts


def test_streams_resume_at_an_upstream_with_the_same_model() -> None:
    rest = [*numbered(3, "lo"), said(finish="stop"), DONE]
    with behind(chunked(*numbered(1, "", "Hel")), chunked(*rest, is_complete=True)) as (front, _, second):
        assert front.chat(model=MODEL, stream=True).body == b"".join([*numbered(1, "", "Hel"), *rest])
        (asked,) = posts(second)
        assert asked.headers["last-event-id"] == f"{ANSWER}-2"
        assert b'resumed_total{upstream="' in front.send("GET", "/metrics").body


def test_streams_resume_at_an_upstream_that_has_to_load_the_model() -> None:
    rest, unloaded = [*numbered(2, "lo"), said(finish="stop"), DONE], {"system_fingerprint": None}
    answers = (chunked(*numbered(1, "Hel")), chunked(*rest, is_complete=True))
    with behind(*answers, traits=({}, unloaded)) as (front, *_):
        assert front.chat(model=MODEL, stream=True).body == b"".join([*numbered(1, "Hel"), *rest])


@pytest.mark.parametrize(
    ("events", "other"),
    [
        (numbered(1, "Hel"), {"system_fingerprint": "fp-2"}),
        (numbered(1, "Hel"), {"owned_by": "vllm"}),
        ([said("Hel")], {}),
    ],
    ids=["other model", "other server", "no IDs"],
)
def test_other_streams_end_with_an_error(events: list[bytes], other: dict[str, Any]) -> None:
    with behind(chunked(*events), whole(), traits=({}, other)) as (front, _, second):
        received = front.chat(model=MODEL, stream=True).body
        assert received.startswith(b"".join(events))
        error = json.loads(received[len(b"".join(events)) :].removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "upstream_lost")
        assert b"[DONE]" not in received
        assert posts(second) == []
        assert "failed" in last_line(front)


@pytest.mark.parametrize(
    "second",
    [
        refusal("409 Conflict"),
        chunked(*numbered(1, "Hel"), DONE, is_complete=True),
        chunked(*numbered(3, "lo"), DONE, is_complete=True),
        chunked(said("lo"), DONE, is_complete=True),
    ],
    ids=["refused", "begins again", "leaves a gap", "no IDs"],
)
def test_streams_that_do_not_continue_are_not_passed_on(second: bytes) -> None:
    with behind(chunked(*numbered(1, "Hel")), second) as (front, *servers):
        received = front.chat(model=MODEL, stream=True).body
        assert received.startswith(numbered(1, "Hel")[0] + b'data: {"error":')
        assert b'"code":"upstream_lost"' in received
        assert len(posts(servers[1])) == 1


def test_a_client_can_continue_its_stream_at_another_server() -> None:
    """The first upstream has a model with this name, but would begin again."""
    rest = [*numbered(3, "lo"), said(finish="stop"), DONE]
    foreign = ({"owned_by": "vllm"},)
    with behind(chunked(HELLO, is_complete=True), chunked(*rest, is_complete=True), traits=foreign) as (
        front,
        *servers,
    ):
        headers = {"Last-Event-ID": f"{ANSWER}-2"}
        reply = front.send("POST", "/v1/chat/completions", {"model": MODEL, "messages": [], "stream": True}, headers)
        assert reply.body == b"".join(rest)
        assert [len(posts(server)) for server in servers] == [0, 1]
