"""Tests that a cancelled request frees its place immediately, with real servers whose queue has one place.

Claude Code, for example, cancels a request after a timeout and repeats it immediately. If the server refuses the
repeated request, the session ends.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.serving.serve_process import Served, served
from tests.support.serving.servers import CHAT, post, read_all, read_until

KEYS = [f"a-key-that-is-long-enough-{number}" for number in range(2)]
STEP_S = 0.15  # a cancelled request runs until the end of the step
_numbers = itertools.count()

pytestmark = pytest.mark.push


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with one slot, a queue of one place for each of two keys, and slow steps."""
    folder = tmp_path_factory.mktemp("model")
    script, keys = folder / "slow.json", folder / "keys"
    script.write_text(json.dumps({"step_seconds": STEP_S}))
    keys.write_text("\n".join(KEYS))
    flags = ["--backend", "scripted", "--parallel", "1", "--max-queue", "1", "--api-key-file", str(keys)]
    with served(str(script), *flags, key=KEYS[0]) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that forwards all requests to the other one."""
    keys = tmp_path_factory.mktemp("front") / "keys"
    keys.write_text(KEYS[0])
    upstream = ["--upstream", server.url, "--upstream-key-file", str(keys)]
    with served("none", "--backend", "scripted", *upstream) as running:
        running.model = server.model
        yield running


def begin(server: Served, body: dict[str, Any]) -> socket.socket:
    line = socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), timeout=30.0)
    line.sendall(post(CHAT, body, Connection="close", Authorization=f"Bearer {KEYS[0]}"))
    return line


def body_of(length: int, **fields: Any) -> dict[str, Any]:
    """Return a request with a prompt of about `length` tokens, which has no prefix in common with other requests."""
    question = f"{next(_numbers)} {'x' * length}"
    return {"messages": [{"role": "user", "content": question}], **fields}


def answer_to(line: socket.socket) -> Any:
    """Return the body of a response that must have the status 200."""
    head, _, body = read_all(line).partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0], body
    return json.loads(body)


@pytest.mark.parametrize("closes_first", [True, False], ids=["closed-first", "closed-late"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["direct", "forwarded"])
def test_a_request_cancelled_in_the_queue_is_repeated(
    server: Served, front: Served, route: str, stream: bool, closes_first: bool
) -> None:
    asked = front if route == "forwarded" else server
    server.wait_for(server.is_idle)
    with closing(begin(server, body_of(1000, stream=True))) as running:
        read_until(running, b'"Y"')
        body = body_of(10, model=server.model, max_tokens=2)
        cancelled = begin(asked, {**body, "stream": stream})
        server.wait_for(lambda: server.metric("requests_waiting") == 1)
        if closes_first:
            cancelled.close()
        repeated = begin(asked, body)
        cancelled.close()
    assert answer_to(repeated)["choices"][0]["message"]["content"] == "Yo"


@pytest.mark.parametrize("phase", ["prompt", "answer"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["direct", "forwarded"])
def test_a_repeated_request_finds_its_prefix(
    server: Served, front: Served, route: str, stream: bool, phase: str
) -> None:
    asked = front if route == "forwarded" else server
    server.wait_for(server.is_idle)
    length = 3000 if phase == "prompt" else 100
    body, before = body_of(length, model=server.model, max_tokens=2), server.metric("steps_total")
    cancelled = begin(asked, {**body, "stream": stream, "max_tokens": 500})
    server.wait_for(lambda: server.metric("steps_total") >= before + (1 if phase == "prompt" else 4))
    cancelled.close()
    usage = answer_to(begin(asked, body))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= (length if phase == "answer" else 500)
