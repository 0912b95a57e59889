"""Tests of the folder of background engines, with real sockets, links, planted files and other users."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.base.errors import LlmrunError
from llmrun.serving.background import place
from llmrun.serving.background.place import Folder, Listener, connect, open_folder, peer_is_us, peer_pid, socket_name

NAME = socket_name("a model")
OTHER = socket_name("another model")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_RUNTIME", tmp_path / "users")
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def folder(nobody_is_logged_in: None) -> Iterator[Folder]:
    found = open_folder(create=True)
    assert found is not None
    with found:
        yield found


def files(folder: Folder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def refusal(**wanted: bool) -> str:
    with pytest.raises(LlmrunError) as raised:
        open_folder(create=wanted.get("create", True))
    assert "\n" not in str(raised.value)
    return str(raised.value)


# The folder.


def test_the_folder_is_private(folder: Folder, tmp_path: Path) -> None:
    assert folder.path == tmp_path / "cache" / "run"
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_looking_for_the_folder_does_not_create_it(tmp_path: Path) -> None:
    assert open_folder(create=False) is None
    assert not (tmp_path / "cache").exists()


def test_the_runtime_folder_comes_first_whatever_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "users" / str(os.geteuid())).mkdir(parents=True)
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == tmp_path / "users" / str(os.geteuid()) / "llmrun"
        assert stat.S_IMODE(found.path.stat().st_mode) == 0o700


def test_a_link_is_no_runtime_folder(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "users" / str(os.geteuid())).symlink_to(tmp_path / "elsewhere")
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == tmp_path / "cache" / "run"


@needs_root
def test_the_runtime_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    own = tmp_path / "users" / str(os.geteuid())
    own.mkdir(parents=True)
    os.chown(own, 65534, 65534)
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == tmp_path / "cache" / "run"


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "run").symlink_to(tmp_path / "private")
    assert refusal().endswith("cache/run: not a folder, or a link to one")
    assert refusal(create=False).endswith("not a folder, or a link to one")


def test_a_dangling_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "run").symlink_to(tmp_path / "nothing")
    assert "not a folder, or a link to one" in refusal()
    assert not (tmp_path / "nothing").exists()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "run").touch()
    assert "not a folder, or a link to one" in refusal()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(folder: Folder, mode: int) -> None:
    folder.path.chmod(mode)
    assert f"other users may access it (mode {mode:04o})" in refusal()


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Folder) -> None:
    os.chown(folder.path, 65534, 65534)
    assert "it belongs to user 65534" in refusal()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Root may write to read-only folders, but not to a file in place of a folder."""
    (tmp_path / "cache").touch()
    assert "cannot use the folder for background engines" in refusal()


def test_without_a_home_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in /etc/passwd
    assert "no home directory" in refusal()
    assert list(tmp_path.iterdir()) == []


# Sockets.


def test_both_sides_know_each_other(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    with connect(folder, NAME, 5) or pytest.fail("nobody answered") as client:
        accepted = listener.accept()
        assert accepted is not None
        with accepted:
            assert accepted.gettimeout() is None
            assert peer_is_us(accepted)
            assert peer_is_us(client)
            assert peer_pid(accepted) == peer_pid(client) == os.getpid()
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
    listener.close()
    assert files(folder) == set()


def test_only_the_user_may_connect_to_the_socket(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    assert files(folder) == {f"{NAME}.sock"}
    assert stat.S_IMODE((folder.path / f"{NAME}.sock").stat().st_mode) == 0o600
    assert folder.names() == [NAME]
    listener.close()


def test_long_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120) / ("ß" * 60)
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(long))
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert len(os.fsencode(found.path)) > 240
        listener = Listener.open(found, NAME)
        client = connect(found, NAME, 5)
        assert client is not None
        client.close()
        assert listener.is_ours()
        listener.close()
        assert files(found) == set()


def test_the_second_listener_takes_over(folder: Folder) -> None:
    first = Listener.open(folder, NAME)
    second = Listener.open(folder, NAME)
    assert not first.is_ours()
    assert second.is_ours()
    first.close()
    assert second.is_ours()
    client = connect(folder, NAME, 5)
    assert client is not None
    client.close()
    second.close()
    assert files(folder) == set()


def test_closing_wakes_a_waiting_thread(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    accepted: list[socket.socket | None] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()))
    thread.start()
    time.sleep(0.05)
    start = time.monotonic()
    listener.close()
    thread.join(5)
    assert accepted == [None]
    assert time.monotonic() - start < 0.5
    assert listener.accept() is None


def test_nobody_answers_a_leftover(folder: Folder) -> None:
    assert connect(folder, NAME, 5) is None
    listener = Listener.open(folder, NAME)
    listener._listening.close()  # as after kill -9
    assert connect(folder, NAME, 5) is None
    assert folder.names() == [NAME]
    folder.remove(NAME)
    folder.remove(NAME)
    assert folder.names() == []


# Locks and calls.


def test_a_call_is_remembered(folder: Folder) -> None:
    assert not folder.called_within(NAME, 600)
    folder.remember_call(NAME)
    assert folder.called_within(NAME, 600)
    assert not folder.called_within(OTHER, 600)
    assert not folder.called_within(NAME, 0)


def test_a_lock_leaves_no_file(folder: Folder) -> None:
    with folder.lock(NAME):
        assert files(folder) == {f"{NAME}.lock"}
        assert stat.S_IMODE((folder.path / f"{NAME}.lock").stat().st_mode) == 0o600
    assert files(folder) == set()
