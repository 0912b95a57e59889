"""A test of forwarding with upstreams whose answers are broken at random places."""

from __future__ import annotations

import random
import socket

import pytest

from tests.support.servers.hostile_server import DONE, HELLO, Asked, HangUp
from tests.support.serving.fake_upstream import MODEL, chunked, refusal, whole
from tests.support.serving.fronts import behind, numbered

pytestmark = pytest.mark.push

REQUESTS = 40
ANSWERS = (
    whole(),
    chunked(HELLO, is_complete=True),
    chunked(*numbered(1, *"ab"), DONE, is_complete=True),
    refusal("429 Full"),
    refusal("503 Loading"),
    refusal("400 Bad"),
)
INSERTED = (b"\r\n", b"\n\n", b"\0", b"{", b'"', b"\xff", b"data: ", b"id: ", b"0\r\n\r\n", b'{"error": {}}')
STATUSES = {200, 400, 429, 502, 503}


def broken(answer: bytes, chance: random.Random) -> bytes:
    """Return an answer with up to five random changes."""
    data = bytearray(answer)
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        place = chance.randrange(len(data) + 1)
        change = chance.random()
        if change < 0.3:
            del data[place : place + chance.randrange(8)]
        elif change < 0.6:
            data[place:place] = chance.choice(INSERTED)
        elif change < 0.8:
            data[place : place + 1] = bytes((chance.randrange(256),))
        else:
            del data[max(1, place) :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(2))
def test_broken_answers_are_errors_and_never_bugs(seed: int) -> None:
    """Each client gets a complete response with a status that says what is wrong."""
    chance = random.Random(seed)

    def answer(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(broken(chance.choice(ANSWERS), chance))
        raise HangUp

    with behind(answer, answer) as (front, *_):
        found = {front.chat(model=MODEL, stream=chance.random() < 0.6).status for _ in range(REQUESTS)}
        assert front.send("GET", "/health").status == 200
    assert front.traces == []
    assert found <= STATUSES
    assert 200 in found
