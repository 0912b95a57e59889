"""Tests of joining and starting engines, with sockets on which threads answer whatever a test prescribes."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.base.processes.frames import framed, read_frame
from llmrun.base.types import ModelInfo
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.background import joining
from llmrun.serving.background.eligibility import RunsAlone, inherited
from llmrun.serving.background.handshake import (
    FACTS,
    HELLO,
    INFO,
    LEAVING,
    REFUSED,
    WELCOME,
    BackgroundFacts,
    build_id,
    greeting,
    read_greeting,
)
from llmrun.serving.background.joining import Joined, join, join_or_start
from llmrun.serving.background.place import Folder, Listener, PlaceError, open_folder, socket_name
from tests.support.serving.fake_model import FACTS as MODEL_FACTS

NAME = socket_name("a model")
PATIENCE_S = 10.0
INFO_OF_MODEL: ModelInfo = MODEL_FACTS.info
FACTS_FRAME = FACTS.encode(
    BackgroundFacts("a-model", INFO_OF_MODEL, 100, True, False, False, SamplingParams(), 1.0, template=None)
)
WELCOMED = framed(greeting(WELCOME, pid=4242, first_id=7 << 32)) + framed(FACTS_FRAME)

Serve = Callable[[socket.socket], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(joining, "_GREETING_S", 0.15)
    monkeypatch.setattr(joining, "_LOOK_S", 0.02)
    found = open_folder(create=True)
    assert found is not None
    with found:
        yield found


@contextmanager
def listening(folder: Folder, serve: Serve) -> Iterator[list[dict[str, Any]]]:
    """Answer connections in a thread. Yields the greetings that have arrived."""
    listener = Listener.open(folder, NAME)
    heard: list[dict[str, Any]] = []

    def run() -> None:
        while (connection := listener.accept()) is not None:
            with suppress(OSError), connection, connection.makefile("rb") as stream:
                heard.append(dict(read_greeting(read_frame(stream, 1 << 20))[1]))
                serve(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        listener.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def saying(data: bytes) -> Serve:
    """Return a server that sends these bytes and then waits until the client has left."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.recv(1)

    return serve


def endlessly(pieces: Iterator[bytes], pause: float = 0.0) -> Serve:
    def serve(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)

    return serve


def test_a_welcome_brings_the_facts_and_the_first_id(folder: Folder) -> None:
    with listening(folder, saying(WELCOMED)) as heard:
        joined = join(folder, NAME, 30.0)
        assert joined is not None
        joined.link.close()
    assert (joined.pid, joined.first_id, joined.facts.name) == (4242, 7 << 32, "a-model")
    assert heard[0]["message"] == HELLO
    assert heard[0]["build"] == build_id()
    assert heard[0]["keep_alive_s"] == 30.0
    assert heard[0]["standing"]["processors"]


def test_there_may_be_no_engine(folder: Folder) -> None:
    assert join(folder, NAME, None) is None
    listener = Listener.open(folder, NAME)
    listener._listening.close()  # as after kill -9: the socket remains, and nobody listens
    assert join(folder, NAME, None) is None
    listener.close()


def test_a_leaving_engine_is_not_joined(folder: Folder) -> None:
    with listening(folder, saying(framed(greeting(LEAVING, pid=1)))):
        assert join(folder, NAME, None) is None


def test_a_refusal_has_a_reason(folder: Folder) -> None:
    refusal = framed(greeting(REFUSED, reason="they differ"))
    with listening(folder, saying(refusal)), pytest.raises(RunsAlone, match="they differ"):
        join(folder, NAME, None)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        framed(b"not JSON"),
        framed(b"[]"),
        framed(b'{"no": "message"}'),
        framed(b"[" * 100_000),
        b"\xff" * 100,
        framed(greeting("unknown")),
        framed(greeting(INFO)),
    ],
)
def test_garbage_counts_as_no_engine(data: bytes, folder: Folder) -> None:
    with listening(folder, saying(data)):
        assert join(folder, NAME, None) is None


@pytest.mark.parametrize(
    "data",
    [
        framed(greeting(WELCOME)),
        framed(greeting(WELCOME, pid="many", first_id=None)) + framed(FACTS_FRAME),
        framed(greeting(WELCOME, pid=1, first_id=1)) + framed(b"\xff\xff"),
        framed(greeting(WELCOME, pid=1, first_id=1)) + b"\xff" * 100,
    ],
)
def test_an_invalid_welcome_is_one_line(data: bytes, folder: Folder) -> None:
    with listening(folder, saying(data)), pytest.raises(RunsAlone, match="sent an invalid answer") as raised:
        join(folder, NAME, None)
    assert "\n" not in str(raised.value)


SLOW = framed(greeting(WELCOME, pid=1, first_id=1) + b" " * 1000)


@pytest.mark.parametrize(
    "serve",
    [
        saying(b""),
        saying(b"\0\0\0"),
        saying(framed(greeting(WELCOME, pid=1, first_id=1))),
        saying(framed(greeting(WELCOME, pid=1, first_id=1)) + (1000).to_bytes(8) + b"x"),
        lambda connection: endlessly((bytes([byte]) for byte in SLOW), 0.02)(connection),
        lambda connection: endlessly(itertools.chain([(1 << 20).to_bytes(8)], itertools.repeat(b" ")), 0.02)(
            connection
        ),
    ],
    ids=["silence", "half a length", "no facts", "half of the facts", "slow bytes", "a long slow frame"],
)
def test_no_engine_can_make_a_client_wait(serve: Serve, folder: Folder) -> None:
    began = time.monotonic()
    with listening(folder, serve):
        with pytest.raises(RunsAlone, match=r"did not answer within|invalid answer: timed out"):
            join(folder, NAME, None)
        assert time.monotonic() - began < 2.0


def test_endless_frames_are_not_read(folder: Folder) -> None:
    with listening(folder, lambda connection: endlessly(itertools.repeat(framed(b"x" * 60_000)))(connection)):
        assert join(folder, NAME, None) is None


def test_a_huge_frame_is_not_read(folder: Folder) -> None:
    with listening(folder, saying((1 << 60).to_bytes(8) + b"x" * 100)):
        assert join(folder, NAME, None) is None


def test_a_planted_file_is_one_line(folder: Folder) -> None:
    (folder.path / f"{NAME}.sock").touch()
    with pytest.raises(PlaceError, match="not a socket"):
        join(folder, NAME, None)


# Starting.


class Starting:
    """Starts engines, which are threads, and counts them."""

    def __init__(self, folder: Folder, serve: Serve | None) -> None:
        self.n_started = 0
        self._folder, self._serve = folder, serve
        self._ends: list[Any] = []

    def __call__(self, asked: Any, tell: Any) -> None:
        self.n_started += 1
        time.sleep(0.05)
        if self._serve is not None:
            context = listening(self._folder, self._serve)
            context.__enter__()
            self._ends.append(context)

    def end(self) -> None:
        for context in self._ends:
            context.__exit__(None, None, None)


def start(folder: Folder, *, waiting: Callable[[], None] = lambda: None) -> tuple[Joined, bool]:
    asked: Any = None  # `_start` is replaced
    joined, was_started = join_or_start(folder, NAME, asked, keep_alive_s=60.0, tell=lambda news: None, waiting=waiting)
    joined.link.close()
    return joined, was_started


def test_only_the_first_client_starts_an_engine(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(folder, lambda connection: connection.sendall(WELCOMED))
    monkeypatch.setattr(joining, "_start", starting)
    found: list[bool] = []
    waited: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(start(folder, waiting=lambda: waited.append(1))[1]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    starting.end()
    assert starting.n_started == 1
    assert sorted(found) == [False] * 7 + [True]
    assert len(waited) <= 7


def test_an_engine_that_ends_at_once_is_one_line(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_start", Starting(folder, None))
    with pytest.raises(RunsAlone, match="ended at once"):
        start(folder)


def test_a_suspended_starter_keeps_nobody_from_its_engine(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops the client that holds the lock, but not the engine that it has started."""
    monkeypatch.setattr(joining, "_start", Starting(folder, None))
    with folder.lock(NAME), listening(folder, lambda connection: connection.sendall(WELCOMED)):
        _, was_started = start(folder)
    assert not was_started


def test_the_wait_for_a_starter_is_limited(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_LONGEST_WAIT_S", 0.1)
    waited: list[int] = []
    with folder.lock(NAME), pytest.raises(RunsAlone, match="another process has been starting the engine"):
        start(folder, waiting=lambda: waited.append(1))
    assert waited == [1]


def test_a_starter_that_was_killed_is_replaced(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(folder, lambda connection: connection.sendall(WELCOMED))
    monkeypatch.setattr(joining, "_start", starting)
    (folder.path / f"{NAME}.lock").touch()  # the system has released the lock, and the file remains
    _, was_started = start(folder)
    starting.end()
    assert was_started


def test_a_starter_that_fails_releases_the_lock(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(asked: Any, tell: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(joining, "_start", fails)
    with pytest.raises(KeyboardInterrupt):
        start(folder)
    assert not (folder.path / f"{NAME}.lock").exists()


# The environment.


def test_engines_inherit_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "LLMRUN_API_KEY", "LD_PRELOAD", "PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in inherited().values()


def test_relative_folders_keep_their_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and their clients run in different folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMRUN_DATA_DIR", "data")
    monkeypatch.setenv("LLMRUN_CONFIG", "~/config.toml")
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", "avx2")
    monkeypatch.setenv("HF_HOME", "")
    found = inherited()
    assert found["LLMRUN_DATA_DIR"] == str(tmp_path / "data")
    assert (found["LLMRUN_CONFIG"], found["LLMRUN_CPU_LEVEL"], found["HF_HOME"]) == ("~/config.toml", "avx2", "")
    assert found["HOME"] == os.environ["HOME"]
