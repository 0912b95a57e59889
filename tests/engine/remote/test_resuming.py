"""Tests of streams that our client continues on another connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from llmrun.engine.remote import client
from llmrun.engine.remote.client import Call, RemoteModel
from llmrun.engine.remote.request import parse_endpoint
from llmrun.engine.remote.stream import ConnectionLost
from tests.support.cli.commands import llmrun
from tests.support.servers.hostile_server import Asked, HangUp, response, serving, stream_head
from tests.support.servers.tcp_relay import relay_to
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.push

NOISE = ("--temp", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0")
FLAGS = ("--json", "--raw", "-n", "40", *NOISE, "abc")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("scripted", "--backend", "scripted") as running:
        yield running


def port_of(server: Served) -> int:
    return urlsplit(server.url).port or 0


@pytest.mark.night
@pytest.mark.parametrize("cuts", [(1500,), (3000,), (1200, 1200, 1200, 2000, 1500, 1400)])
def test_broken_streams_continue_with_the_same_text(server: Served, cuts: tuple[int, ...]) -> None:
    """There are more tokens than the cuts need, because a busy server sends several of them at once."""
    flags = ("-q", "--seed", "7", *FLAGS, "-n", "160")
    whole = json.loads(llmrun("generate", "-m", server.url, *flags).stdout)
    with relay_to(port_of(server), cuts) as relay:
        done = llmrun("generate", "-m", f"http://127.0.0.1:{relay.port}/v1#scripted", *flags)
        assert len(relay.ttft_s) > 1
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"] == whole["choices"]
    assert len(whole["choices"][0]["message"]["content"]) >= 30


def test_the_first_error_of_a_server_that_stays_down_is_raised(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSES_S", (0.01, 0.01))
    body = {"prompt": "abc", "max_tokens": 40, "stream": True, "ignore_eos": True}
    with relay_to(port_of(server), [1500, 0, 0, 0]) as relay:
        model = RemoteModel(parse_endpoint(f"http://127.0.0.1:{relay.port}/v1#scripted"))
        with pytest.raises(ConnectionLost, match="connection lost"):
            [*model.stream("/completions", body, {}, Call(), most_events=100)]
        model.close()


FIRST = f"{'0' * 24}-{'a' * 8}-1"


def event(number: int, text: str, finish: str | None = None, prefix: str = FIRST[:-1]) -> bytes:
    data = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return f"id: {prefix}{number}\ndata: {json.dumps(data)}\n\n".encode()


@pytest.mark.parametrize("prefix", ["event-", FIRST[:-1]])
def test_servers_that_begin_again_are_noticed(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of others may give IDs, too, and ignore them. The text would be there twice."""
    monkeypatch.setattr(client, "_PAUSES_S", (0.01, 0.01))
    answers = iter([event(1, "Hel", prefix=prefix), event(1, "Hel", prefix=prefix) + event(2, "lo", "stop", prefix)])

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + next(answers))
        raise HangUp

    texts: list[str] = []
    with serving(script) as other:
        model = RemoteModel(parse_endpoint(other.url))
        with pytest.raises(ConnectionLost):
            texts.extend(
                chunk.text for chunk in model.stream("/completions", {"prompt": "a"}, {}, Call(), most_events=9)
            )
        model.close()
    assert texts == ["Hel"]
    assert len(other.asked) == (2 if prefix == FIRST[:-1] else 1)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_servers_that_load_their_model_are_asked_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSES_S", (0.01, 0.01))
    first, rest = event(1, "Hel"), event(2, "lo", "stop")
    busy = response(b"{}", status=f"{status} Later")
    answers = iter([stream_head() + first, busy, stream_head() + rest])

    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(next(answers))
        raise HangUp

    with serving(script) as other:
        model = RemoteModel(parse_endpoint(other.url))
        chunks = [*model.stream("/completions", {"prompt": "a"}, {}, Call(), most_events=9)]
        model.close()
    assert "".join(chunk.text for chunk in chunks) == "Hello"
    assert [asked.headers.get("last-event-id") for asked in other.asked] == [None, FIRST, FIRST]
