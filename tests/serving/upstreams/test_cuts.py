"""Tests of streams that are cut off after any number of bytes, in all APIs."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.support.servers.hostile_server import Asked, HangUp, response
from tests.support.servers.hostile_server import serving as scripted
from tests.support.serving.fake_model import FACTS, FakeModel, text
from tests.support.serving.fronts import fronting
from tests.support.serving.servers import RunningServer, eventually, serving

pytestmark = pytest.mark.push

MODEL = "tiny"
CHATTED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHATTED,
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "Hello", "stream": True},
    "/v1/messages": {**CHATTED, "max_tokens": 9},
    "/completion": {"model": MODEL, "prompt": "Hello", "stream": True},
    "/infill": {"model": MODEL, "input_prefix": "Hello", "input_suffix": "", "stream": True},
    "/api/chat": CHATTED,
}
WORDS = ("one", " two", " three")
_SOME = 7  # cuts in each stream
_LAST = 40  # bytes at the end that may be missing: the answer is complete before them


@pytest.fixture(scope="module", params=[True, False], ids=["repeatable", "not repeatable"])
def origin(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    model = FakeModel(lambda number: text(*WORDS))
    model.facts = structs.replace(FACTS, name=MODEL, info=replace(FACTS.info, batch_invariant=request.param))
    with serving(model) as running:
        yield running


def without_names(events: bytes) -> bytes:
    """Remove what differs between two answers with the same text: IDs, seeds and times."""
    named = r'[0-9a-f]{24}|-[0-9a-f]{8}-|"(seed|created|created_at|completed_at|\w*duration)":("[^"]*"|[\d.]+)'
    return re.sub(named.encode(), b"", events)


@pytest.mark.parametrize("path", CALLS)
def test_no_cut_truncates_an_answer_silently(origin: RunningServer, path: str) -> None:
    """Repeatable streams are continued without a gap, and others have an error after the text that has arrived."""
    direct = origin.send("POST", path, CALLS[path])
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {direct.headers['content-type']}\r\n\r\n".encode()
    listed, sent = origin.send("GET", "/v1/models").body, head + direct.body
    cut_at: list[int] = []

    def cut(asked: Asked, connection: socket.socket) -> None:
        if asked.method == "GET":
            connection.sendall(response(listed, kind="application/json"))
            return
        connection.sendall(sent[: cut_at[-1]])
        raise HangUp

    with (
        scripted(cut) as cutting,
        fronting(*(f"http://127.0.0.1:{one}" for one in (cutting.port, origin.port))) as front,
    ):
        assert front.service.upstreams is not None
        first = front.service.upstreams.all[0]
        for number in range(_SOME):
            cut_at.append(number * (len(sent) - _LAST) // (_SOME - 1))
            before = len(cutting.asked)
            while not any(asked.method == "POST" for asked in cutting.asked[before:]):
                eventually(lambda: first.is_up)
                got = front.send("POST", path, CALLS[path]).body
            if without_names(got) == without_names(direct.body):
                continue
            assert cut_at[-1] > len(head)
            *events, error = re.split(rb"(?<=\n\n)" if b"\n\n" in direct.body else rb"(?<=\n)", got.rstrip(b"\n"))
            assert direct.body.startswith(b"".join(events))
            assert b"the upstream failed in the middle of the answer" in error
            assert path == "/api/chat" or b"id: " not in direct.body
