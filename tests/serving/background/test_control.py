"""Tests of listing and stopping background engines."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.serving.background import control
from llmrun.serving.background.control import Leftover, leftovers, make_room, remove, running, stop
from llmrun.serving.background.place import Folder, open_folder, socket_name
from tests.support.serving.fake_engine import started

if sys.platform == "win32":
    pytest.skip("needs Unix sockets", allow_module_level=True)

NAME = socket_name("one")


@pytest.fixture
def folder(engines: Path) -> Iterator[Folder]:
    found = open_folder(create=True)
    assert found is not None
    with found:
        yield found


def abandoned(folder: Folder) -> Path:
    """Leave a socket on which nobody listens."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(folder.socket_address(f"{NAME}.sock"))
    return folder.path / f"{NAME}.sock"


def titles() -> list[str]:
    return sorted(engine.title for engine in running())


def test_asking_creates_no_folder(engines: Path) -> None:
    assert running() == []
    assert leftovers() == []
    assert not make_room()
    assert not engines.exists()


def test_a_socket_without_a_process_is_a_leftover(folder: Folder) -> None:
    path = abandoned(folder)
    assert running() == []
    assert leftovers() == [Leftover(path, NAME)]
    remove(path)
    assert [*folder.path.iterdir()] == []


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ("Traceback (most recent call last):\n  File\nMemoryError\n\n", "MemoryError"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File 3\n", "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_last_message_of_a_crashed_engine_is_found(folder: Folder, log: str, problem: str) -> None:
    path = folder.path / f"{NAME}.log"
    path.write_text(log)
    assert leftovers() == [Leftover(path, NAME, problem)]
    remove(path)
    assert not path.exists()


def test_an_empty_log_may_belong_to_a_leaving_engine(folder: Folder) -> None:
    (folder.path / f"{NAME}.log").touch()
    assert leftovers() == []
    abandoned(folder)
    assert [each.path.suffix for each in leftovers()] == [".sock", ".log"]


@pytest.mark.push
def test_engines_of_other_versions_are_listed_and_stopped(folder: Folder) -> None:
    process = started("one", version="99.0", unknown={"new": [1]}, used=2e9)
    (engine,) = running()
    assert engine.state is not None
    assert (engine.pid, engine.state.version, engine.activity) == (process.pid, "99.0", "idle")
    assert all(map(engine.is_named, ("Tiny", "/models/tiny.gguf", "/models/../models/tiny.gguf")))
    assert not any(map(engine.is_named, ("tin", "tiny.gguf", "")))
    (folder.path / f"{NAME}.log").write_text("a message\n")
    assert leftovers() == []
    stop(engine)
    assert process.poll() is not None
    assert running() == []


@pytest.mark.push
def test_stop_waits_until_the_process_is_gone(folder: Folder) -> None:
    process = started("one", stop_takes=0.5)
    stop(running()[0])
    assert process.poll() == 0
    assert [*folder.path.iterdir()] == []


@pytest.mark.push
def test_only_force_ends_an_answering_engine(folder: Folder) -> None:
    process = started("one", answers=2)
    (engine,) = running()
    assert engine.activity == "generating"
    with pytest.raises(LlmrunError, match=r"cannot stop tiny: the engine is generating 2 answers$"):
        stop(engine)
    assert process.poll() is None
    stop(engine, force=True)
    assert process.poll() == 0


@pytest.mark.push
def test_suspended_engines_delay_nobody(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_AGREE_S", 0.3)
    processes = [started(key) for key in ("one", "two", "three")]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    found = running()
    assert time.monotonic() - began < 2.5
    assert {engine.pid for engine in found} == {process.pid for process in processes}
    assert {engine.activity for engine in found} == {"not answering"}
    assert leftovers() == []
    assert not make_room()
    with pytest.raises(LlmrunError, match="does not answer"):
        stop(found[0])
    for engine in found:
        stop(engine, force=True)
    assert {process.poll() for process in processes} == {-signal.SIGKILL}
    assert [*folder.path.iterdir()] == []


@pytest.mark.push
def test_the_longest_idle_leave_first_to_make_room(folder: Folder) -> None:
    for key, used, answers in (("old", 3, 0), ("older", 2, 0), ("new", 4, 0), ("busy", 1, 1)):
        started(key, name=key, used=used, answers=answers)
    assert not make_room(most_idle=3)
    assert make_room(most_idle=2)
    assert titles() == ["busy", "new", "old"]
    assert make_room()
    assert titles() == ["busy"]
    assert [path.stem for path in folder.path.iterdir()] == [socket_name("busy")]
