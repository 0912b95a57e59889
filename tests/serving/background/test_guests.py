"""Tests of the clients of a background engine, with socket pairs and an engine that only records its messages."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.base.processes.frames import BadMessage, framed, read_frame
from llmrun.base.types import FinishReason
from llmrun.engine.child.messages import (
    FROM_CHILD,
    LONGEST,
    TO_CHILD,
    Ask,
    Beat,
    Begun,
    Cancel,
    Close,
    CountPrompt,
    Embedded,
    FromChild,
    Note,
    Open,
    PromptCounted,
    Rejected,
    Stepped,
    Taken,
    ToChild,
    cancelled_unbegun,
)
from llmrun.engine.requests import Finished, Request, TextDelta, TextPrompt
from llmrun.serving.background import guests as guests_module
from llmrun.serving.background.guests import Guest, Guests

PATIENCE_S = 10.0
REQUEST = Request(TextPrompt("Hello"))


def wait_until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Engine:
    """Guests, and what they pass to the engine."""

    def __init__(self) -> None:
        self.taken: list[ToChild] = []
        self.told: list[int] = []  # the unfinished requests and calls whenever some were over
        self.guests = Guests(self.taken.append, self._on_over)
        self.clients: list[Client] = []

    def _on_over(self) -> None:
        self.told.append(self.guests.answers)

    def client(self) -> Client:
        self.clients.append(Client(self))
        return self.clients[-1]


class Client:
    """One end of a socket pair, whose other end is served in a thread."""

    def __init__(self, engine: Engine) -> None:
        self.socket, theirs = socket.socketpair()
        guest = engine.guests.received(theirs)
        assert guest is not None
        self.guest: Guest = guest
        self.first_id = guest.first_id
        self.error: Exception | None = None
        self._engine = engine
        self._stream = self.socket.makefile("rb")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        wait_until(lambda: self.first_id >> 32 in engine.guests._guests)

    def _serve(self) -> None:
        try:
            self._engine.guests.serve(self.guest)
        except Exception as error:  # noqa: BLE001 - tests check the error
            self.error = error
        finally:
            self._engine.guests.release(self.guest)

    def send(self, *messages: ToChild) -> None:
        """Send messages and wait until they have been passed to the engine or the connection has ended."""
        expected = len(self._engine.taken) + len(messages)
        for message in messages:
            self.socket.sendall(framed(TO_CHILD.encode(message)))
        wait_until(lambda: len(self._engine.taken) >= expected or not self._thread.is_alive())

    def received(self) -> FromChild | None:
        frame = read_frame(self._stream, LONGEST)
        return None if frame is None else FROM_CHILD.decode(frame)

    def wait(self) -> None:
        """Wait until the engine has ended the connection."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    for client in made.clients:
        client.close()
        client.wait()
    assert made.guests._n_open == 0


def delta(client: Client, text: str) -> TextDelta:
    return TextDelta(client.first_id, text, ())


def finished(request_id: int) -> Stepped:
    return Stepped((cancelled_unbegun(request_id),))


def test_each_client_gets_its_own_events(engine: Engine) -> None:
    one, other = engine.client(), engine.client()
    for client in (one, other):
        client.send(Ask(client.first_id, REQUEST, 0.0))
    events = [delta(client, text) for text in "ab" for client in (one, other)]
    engine.guests.send(Taken(other.first_id, 3, 0.0))
    engine.guests.send(Stepped(tuple(events)))
    assert one.received() == Stepped((events[0], events[2]))
    assert other.received() == Taken(other.first_id, 3, 0.0)
    assert other.received() == Stepped((events[1], events[3]))


def test_messages_about_the_engine_reach_no_client(engine: Engine) -> None:
    client = engine.client()
    client.send(Ask(client.first_id, REQUEST, 0.0))
    for message in (Beat(busy=True), Begun((client.first_id,)), Note("a note")):
        engine.guests.send(message)
    engine.guests.send(finished(client.first_id))
    assert isinstance(client.received(), Stepped)


@pytest.mark.parametrize("end", [finished, lambda call: Rejected(call, UsageError("no"))])
def test_the_last_event_ends_an_answer(end: Any, engine: Engine) -> None:
    client = engine.client()
    client.send(Ask(client.first_id, REQUEST, 0.0), Ask(client.first_id + 1, REQUEST, 0.0))
    assert engine.guests.answers == 2
    engine.guests.send(end(client.first_id))
    assert (engine.guests.answers, engine.told) == (1, [2])
    engine.guests.send(end(client.first_id + 1))
    assert (engine.guests.answers, engine.told) == (0, [2, 1, 0])


def test_a_call_ends_with_its_last_part(engine: Engine) -> None:
    client = engine.client()
    client.send(CountPrompt(client.first_id, REQUEST), CountPrompt(client.first_id + 1, REQUEST))
    engine.guests.send(PromptCounted(client.first_id, 3))
    engine.guests.send(Embedded(client.first_id + 1, b"", (), is_last=False))
    assert engine.guests.answers == 1
    engine.guests.send(Embedded(client.first_id + 1, b"", ()))
    assert engine.guests.answers == 0


def test_a_client_that_leaves_cancels_its_requests(engine: Engine) -> None:
    one, other = engine.client(), engine.client()
    for client in (one, other):
        client.send(Ask(client.first_id, REQUEST, 0.0))
    one.close()
    one.wait()
    assert engine.taken[-1] == Cancel((one.first_id,))
    engine.guests.send(Stepped((delta(one, "a"), delta(other, "b"))))
    assert other.received() == Stepped((delta(other, "b"),))
    engine.guests.send(finished(one.first_id))
    assert engine.guests.answers == 1


def test_an_idle_client_leaves_without_a_trace(engine: Engine) -> None:
    client = engine.client()
    client.close()
    client.wait()
    assert engine.taken == []
    assert engine.guests._guests == {}


@pytest.mark.parametrize("message", [Close(), Open("/some/model.gguf")])
def test_clients_cannot_close_or_open_a_model(message: ToChild, engine: Engine) -> None:
    client = engine.client()
    client.send(message)
    client.wait()
    assert isinstance(client.error, BadMessage)
    assert engine.taken == []


@pytest.mark.parametrize("message", [lambda each: Ask(each, REQUEST, 0.0), lambda each: Cancel((each,))])
def test_the_ids_of_other_clients_are_refused(message: Any, engine: Engine) -> None:
    victim, client = engine.client(), engine.client()
    victim.send(Ask(victim.first_id, REQUEST, 0.0))
    client.send(message(victim.first_id))
    client.wait()
    assert isinstance(client.error, BadMessage)
    assert len(engine.taken) == 1


def test_an_id_is_used_once(engine: Engine) -> None:
    """Otherwise, a client could end the engine, which expects that ids are unique."""
    client = engine.client()
    client.send(Ask(client.first_id + 5, REQUEST, 0.0))
    client.send(CountPrompt(client.first_id + 5, REQUEST))
    client.wait()
    assert isinstance(client.error, BadMessage)
    assert engine.taken == [Ask(client.first_id + 5, REQUEST, 0.0), Cancel((client.first_id + 5,))]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", framed(b""), framed(b"\xc1{}"), framed(b"\x00" * 100), b"\xff" * 64, framed(b"[1, 2]")],
)
def test_garbage_ends_only_its_connection(data: bytes, engine: Engine) -> None:
    other, client = engine.client(), engine.client()
    other.send(Ask(other.first_id, REQUEST, 0.0))
    client.socket.sendall(data)
    client.socket.shutdown(socket.SHUT_WR)
    client.wait()
    assert client.received() is None
    engine.guests.send(finished(other.first_id))
    assert isinstance(other.received(), Stepped)


def test_sending_never_waits_for_a_client(engine: Engine) -> None:
    """A client that Ctrl-Z has stopped reads nothing until it continues."""
    slow, quick = engine.client(), engine.client()
    for client in (slow, quick):
        client.send(Ask(client.first_id, REQUEST, 0.0))
    text = "x" * 100_000
    began = time.monotonic()
    for _ in range(100):
        engine.guests.send(Stepped((delta(slow, text), delta(quick, "y"))))
        assert quick.received() == Stepped((delta(quick, "y"),))
    assert time.monotonic() - began < PATIENCE_S
    engine.guests.send(finished(slow.first_id))
    for _ in range(100):  # nothing is lost, and nothing changes its order
        assert slow.received() == Stepped((delta(slow, text),))
    last = slow.received()
    assert isinstance(last, Stepped)
    assert isinstance(last.events[0], Finished)
    assert last.events[0].reason is FinishReason.CANCELLED


def test_a_client_that_reads_nothing_loses_its_connection(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_module, "_MOST_UNREAD", 1 << 20)
    client = engine.client()
    client.send(Ask(client.first_id, REQUEST, 0.0))
    text = "x" * 100_000
    for _ in range(50):
        engine.guests.send(Stepped((delta(client, text),)))
    client.wait()
    assert client.guest._unsent_bytes <= 2 << 20
    assert engine.taken[-1] == Cancel((client.first_id,))


def test_a_leaving_engine_takes_no_request(engine: Engine) -> None:
    client = engine.client()
    client.send(Ask(client.first_id, REQUEST, 0.0))
    assert not engine.guests.refuse_if_idle()
    client.send(Ask(client.first_id + 1, REQUEST, 0.0))
    assert len(engine.taken) == 2
    for number in (0, 1):
        engine.guests.send(finished(client.first_id + number))
    assert engine.guests.refuse_if_idle()
    client.send(Ask(client.first_id + 2, REQUEST, 0.0))
    client.wait()
    assert len(engine.taken) == 2
    assert client.error is None


def test_the_end_of_the_engine_ends_all_connections(engine: Engine) -> None:
    clients = [engine.client() for _ in range(3)]
    engine.guests.close()
    for client in clients:
        client.wait()
        assert client.received() is None
    late = engine.client()
    late.send(Ask(late.first_id, REQUEST, 0.0))
    late.wait()
    assert engine.taken == []


def test_a_silent_stranger_loses_its_connection(engine: Engine) -> None:
    ours, theirs = socket.socketpair()
    guest = engine.guests.received(theirs)
    assert guest is not None
    began = time.monotonic()
    assert guest.receive(100, 0.05) is None
    assert time.monotonic() - began < PATIENCE_S
    engine.guests.release(guest)
    assert ours.recv(1) == b""
    ours.close()


def test_the_number_of_connections_is_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_module, "_MOST_GUESTS", 2)
    clients = [engine.client() for _ in range(2)]
    ours, theirs = socket.socketpair()
    assert engine.guests.received(theirs) is None
    clients[0].close()
    clients[0].wait()
    guest = engine.guests.received(theirs)
    assert guest is not None
    engine.guests.release(guest)
    ours.close()
