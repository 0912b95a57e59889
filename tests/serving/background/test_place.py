"""Tests of the folder of background engines, with real sockets, links, planted files and other users."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

import fcntl
import resource

from llmrun.base.errors import LlmrunError
from llmrun.base.machine import processor
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
def default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unset LLMRUN_CACHE_DIR, and return the folder for engines in the cache folder."""
    monkeypatch.delenv("LLMRUN_CACHE_DIR", raising=False)
    monkeypatch.setattr(place, "cache_folder", lambda name: tmp_path / "default" / name)
    return tmp_path / "default" / "run"


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
    tmp_path: Path, default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("LLMRUN_CACHE_DIR", raising=False)
    (tmp_path / "users" / str(os.geteuid())).mkdir(parents=True)
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == tmp_path / "users" / str(os.geteuid()) / "llmrun"
        assert stat.S_IMODE(found.path.stat().st_mode) == 0o700


def test_the_variable_for_the_cache_moves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "users" / str(os.geteuid())).mkdir(parents=True)
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == tmp_path / "cache" / "run"


def test_a_link_is_no_runtime_folder(tmp_path: Path, default_cache: Path) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "users" / str(os.geteuid())).symlink_to(tmp_path / "elsewhere")
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == default_cache


@needs_root
def test_the_runtime_folder_of_another_user_is_not_used(tmp_path: Path, default_cache: Path) -> None:
    own = tmp_path / "users" / str(os.geteuid())
    own.mkdir(parents=True)
    os.chown(own, 65534, 65534)
    found = open_folder(create=True)
    assert found is not None
    with found:
        assert found.path == default_cache


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
    assert refusal() == (
        f"cannot use the folder for background engines: {tmp_path}/cache: not a folder, or a link to one"
    )


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    assert refusal().endswith("cache: No space left on device")


def test_without_a_home_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CACHE_DIR", raising=False)
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has addresses by descriptor")
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
    before = (folder.path / f"{NAME}.sock").stat()
    first.close()
    assert (folder.path / f"{NAME}.sock").stat() == before  # not even renamed for a moment, which changes a time
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


@pytest.mark.parametrize("delay", [0, 0.03])
def test_a_signal_handler_may_close(folder: Folder, delay: float) -> None:
    listener = Listener.open(folder, NAME)
    before = signal.signal(signal.SIGALRM, lambda number, frame: listener.close())
    try:
        if delay:
            signal.setitimer(signal.ITIMER_REAL, delay)
            assert listener.accept() is None
        else:
            with listener._lock:
                signal.raise_signal(signal.SIGALRM)
            assert listener.accept() is None
    finally:
        signal.signal(signal.SIGALRM, before)
    assert files(folder) == set()


def test_nobody_answers_a_leftover(folder: Folder) -> None:
    assert connect(folder, NAME, 5) is None
    listener = Listener.open(folder, NAME)
    listener._listening.close()  # as after kill -9
    assert connect(folder, NAME, 5) is None
    assert folder.names() == [NAME]
    folder.remove(NAME)
    folder.remove(NAME)
    assert folder.names() == []
    listener.close()


@needs_root
def test_another_users_file_or_process_is_refused(folder: Folder) -> None:
    path = folder.path / f"{NAME}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as planted:
        planted.bind(folder.socket_address(path.name))
        os.chown(path, 65534, 65534)
        with pytest.raises(LlmrunError, match="belongs to user 65534"):
            connect(folder, NAME, 5)
        os.chown(path, 0, 0)
        os.seteuid(65534)
        try:
            planted.listen()  # the system records the user at this moment
        finally:
            os.seteuid(0)
        with pytest.raises(LlmrunError, match="belongs to user 65534"):
            connect(folder, NAME, 5)


@needs_root
def test_the_listening_side_sees_another_user(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        address = folder.socket_address(f"{NAME}.sock")
        folder.path.chmod(0o755)
        (folder.path / f"{NAME}.sock").chmod(0o666)
        for above in [*folder.path.parents][:-2]:
            above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(65534)
        try:
            client.connect(address)
        finally:
            os.seteuid(0)
        accepted = listener.accept()
        assert accepted is not None
        with accepted:
            assert not peer_is_us(accepted)
            assert peer_pid(accepted) == os.getpid()
    listener.close()


def test_peers_that_are_no_unix_sockets_are_not_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert not peer_is_us(client)
        assert peer_pid(client) is None


@pytest.mark.parametrize("uid", [0, 501])
def test_macos_reports_the_peer(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    def option(level: int, name: int, size: int = 0) -> int | bytes:
        assert level == 0
        if name == 2:
            return 77
        assert (name, size) == (1, 76)  # struct xucred
        return (0).to_bytes(4, sys.byteorder) + uid.to_bytes(4, sys.byteorder) + bytes(68)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    peer = cast(socket.socket, SimpleNamespace(getsockopt=option))
    assert (peer_is_us(peer), peer_pid(peer)) == (uid == 501, 77)


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_files_other_than_sockets_are_refused_and_replaced(folder: Folder, tmp_path: Path, kind: str) -> None:
    real = Listener.open(folder, OTHER)
    path = folder.path / f"{NAME}.sock"
    make: dict[str, Callable[[], object]] = {
        "file": path.touch,
        "link": lambda: path.symlink_to(f"{OTHER}.sock"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    with pytest.raises(LlmrunError, match="not a socket"):
        connect(folder, NAME, 5)
    if kind == "folder":
        with pytest.raises(LlmrunError, match="cannot listen on a socket"):
            Listener.open(folder, NAME)
    else:
        Listener.open(folder, NAME).close()
    real.close()
    assert files(folder) == ({path.name} if kind == "folder" else set())


def test_sockets_of_another_kind_are_an_error(folder: Folder) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as planted:
        planted.bind(folder.socket_address(f"{NAME}.sock"))
        with pytest.raises(LlmrunError, match="cannot connect to a background engine"):
            connect(folder, NAME, 5)


def test_without_proc_long_paths_are_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_DESCRIPTORS", folder.path / "nothing")
    assert folder.socket_address("a.sock") == str(folder.path / "a.sock")
    folder.path = folder.path / ("x" * 100)
    with pytest.raises(LlmrunError, match="path too long for a socket"):
        folder.socket_address("a.sock")


def test_a_takeover_while_closing_is_not_undone(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second listener takes over after the first one has checked that the name is its own."""
    first = Listener.open(folder, NAME)
    second = Listener.open(folder, NAME)
    monkeypatch.setattr(first, "is_ours", lambda: True)
    first.close()
    assert second.is_ours()
    assert files(folder) == {f"{NAME}.sock"}
    second.close()


def test_a_socket_without_its_folder_is_not_ours(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    folder.path.rename(folder.path.with_name("moved"))
    assert not listener.is_ours()
    folder.path.mkdir()
    assert not listener.is_ours()
    listener.close()


def test_a_removed_socket_is_not_ours(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    folder.remove(NAME)
    (folder.path / f"{NAME}.sock").touch()
    assert not listener.is_ours()
    listener.close()
    assert files(folder) == {f"{NAME}.sock"}


def test_connections_before_withdrawal_are_accepted(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    with connect(folder, NAME, 5) or pytest.fail("nobody answered"):
        listener.withdraw()
        assert connect(folder, NAME, 5) is None
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()
    listener.close()


def test_a_queue_that_stays_full_is_an_error(folder: Folder) -> None:
    listener = Listener.open(folder, NAME, backlog=0)
    first = connect(folder, NAME, 5)
    assert first is not None
    with pytest.raises(LlmrunError, match="too many clients are waiting"):
        connect(folder, NAME, 0.05)
    first.close()
    listener.close()


def test_clients_wait_for_a_full_queue(folder: Folder) -> None:
    listener = Listener.open(folder, NAME, backlog=0)
    first = connect(folder, NAME, 5)
    accepted: list[socket.socket | None] = []
    timer = threading.Timer(0.05, lambda: accepted.append(listener.accept()))
    timer.start()
    second = connect(folder, NAME, 5)
    timer.join()
    for each in (first, second, *accepted):
        assert each is not None
        each.close()
    listener.close()


def test_accepting_waits_for_a_free_descriptor(folder: Folder) -> None:
    listener = Listener.open(folder, NAME)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(folder, NAME, 5) or pytest.fail("nobody answered"):
        next_free = os.dup(0)
        os.close(next_free)
        timer = threading.Timer(0.06, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
        try:
            timer.start()
            accepted = listener.accept()
        finally:
            timer.join()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert accepted is not None
        accepted.close()
    listener.close()


def test_many_listeners_leave_nothing(folder: Folder) -> None:
    gc.collect()  # closes what other tests have left open
    descriptors = len([*Path("/dev/fd").iterdir()])
    for _ in range(200):
        listener = Listener.open(folder, NAME)
        listener.close()
        listener.close()
    assert files(folder) == set()
    assert len([*Path("/dev/fd").iterdir()]) == descriptors


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


def test_a_lock_is_awaited(folder: Folder) -> None:
    events: list[str] = []

    def wait() -> None:
        with folder.lock(NAME, waiting=lambda: events.append("waits")):
            events.append("second")

    with folder.lock(NAME):
        thread = threading.Thread(target=wait)
        thread.start()
        while not events:
            time.sleep(0.001)
        events.append("first")
    thread.join(5)
    assert events == ["waits", "first", "second"]
    assert files(folder) == set()


def test_waiting_for_a_lock_can_end_early(folder: Folder) -> None:
    with (
        folder.lock(NAME),
        folder.lock(OTHER),
        pytest.raises(LlmrunError, match="another process still holds a lock"),
        folder.lock(NAME, seconds=0.03),
    ):
        pytest.fail("two hold the lock")
    assert files(folder) == set()


def test_errors_of_the_callback_are_not_errors_of_the_lock(folder: Folder) -> None:
    def complain() -> None:
        raise BrokenPipeError

    with folder.lock(NAME), pytest.raises(BrokenPipeError), folder.lock(NAME, waiting=complain):
        pytest.fail("two hold the lock")


def test_file_systems_without_locks_are_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LlmrunError, match="No locks available"), folder.lock(NAME):
        pytest.fail("locked")


def test_a_lock_whose_folder_fails_is_released(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: str) -> None:
        raise place.PlaceError("the file server is gone")

    def work() -> None:
        monkeypatch.setattr(folder, "status", fail)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), folder.lock(NAME):
        work()
    with Folder(folder.path, os.open(folder.path, os.O_RDONLY)) as fresh, fresh.lock(NAME, seconds=0):
        pass


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_planted_files_get_no_lock(folder: Folder, tmp_path: Path, kind: str) -> None:
    for end in ("lock", "called"):
        path = folder.path / f"{NAME}.{end}"
        path.symlink_to(tmp_path / "victim") if kind == "link" else path.mkdir()
    with pytest.raises(LlmrunError, match="cannot lock a file"), folder.lock(NAME):
        pytest.fail("locked")
    with pytest.raises(LlmrunError, match="cannot record a call"):
        folder.remember_call(NAME)
    assert not (tmp_path / "victim").exists()


def test_a_lock_file_that_was_replaced_stays(folder: Folder) -> None:
    path = folder.path / f"{NAME}.lock"
    with folder.lock(NAME):
        path.unlink()
        path.touch()
    assert path.exists()


def test_a_file_that_keeps_changing_is_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_ATTEMPTS", 3)
    monkeypatch.setattr(folder, "is_same", lambda file, expected: False)
    with pytest.raises(LlmrunError, match="the file keeps changing"), folder.lock(NAME):
        pytest.fail("locked")


def forked(work: Callable[[], object]) -> int:
    """Run a function in a child process, which exits with 0 if the function returns, and with 9 after Ctrl-C."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except KeyboardInterrupt:
        status = 9
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.push
def test_one_process_at_a_time_holds_a_lock(folder: Folder, tmp_path: Path) -> None:
    """Each of 20 processes increases a number 25 times, which loses counts if two do it at the same time."""
    number = tmp_path / "number"
    number.write_text("0")

    def count() -> None:
        for _ in range(25):
            with folder.lock(NAME):
                before = int(number.read_text())
                time.sleep(0.0002)
                number.write_text(str(before + 1))

    place_look, place._LOOK_S = place._LOOK_S, 0.0005
    try:
        pids = [forked(count) for _ in range(20)]
        assert [ended(pid) for pid in pids] == [0] * 20
    finally:
        place._LOOK_S = place_look
    assert int(number.read_text()) == 20 * 25
    assert files(folder) == set()


@pytest.mark.push
def test_ctrl_c_ends_waiting_for_a_lock(folder: Folder) -> None:
    def wait() -> None:
        with folder.lock(NAME, waiting=lambda: (folder.path / "waits").touch()):
            pass

    with folder.lock(NAME):
        pid = forked(wait)
        while not (folder.path / "waits").exists():
            time.sleep(0.001)
        os.kill(pid, signal.SIGINT)
        assert ended(pid) == 9
    assert files(folder) == {"waits"}


@pytest.mark.push
def test_killed_processes_hold_no_lock(folder: Folder) -> None:
    def hold() -> None:
        with folder.lock(NAME):
            (folder.path / "holds").touch()
            time.sleep(60)

    pid = forked(hold)
    while not (folder.path / "holds").exists():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    assert f"{NAME}.lock" in files(folder)
    with folder.lock(NAME, seconds=5):
        pass
    assert files(folder) == {"holds"}


def test_a_call_in_the_future_does_not_count(folder: Folder) -> None:
    """The clock may have been wrong when the call was recorded."""
    folder.remember_call(NAME)
    os.utime(folder.path / f"{NAME}.called", (time.time() + 60,) * 2)
    assert not folder.called_within(NAME, 600)


def test_old_files_of_all_names_are_removed(folder: Folder) -> None:
    elsewhere = "f" * 16 if not NAME.startswith("f") else "e" * 16  # the name of a socket of another computer
    own = Listener.open(folder, OTHER)
    old = {f"{OTHER}.called", f"{OTHER}.lock", "01234567.tmp", f"{elsewhere}.sock"}
    kept = {f"{OTHER}.sock", "mine.txt", f"{NAME}.called"}
    for name in (old | kept) - {f"{OTHER}.sock"}:
        (folder.path / name).touch()
    with folder.lock(elsewhere):
        for name in files(folder):
            os.utime(folder.path / name, (time.time() - 8 * 24 * 3600,) * 2)
        folder.remember_call(NAME)
        assert files(folder) == kept | {f"{elsewhere}.lock"}
    own.close()


def test_recent_files_are_kept(folder: Folder) -> None:
    elsewhere = "f" * 16 if not NAME.startswith("f") else "e" * 16
    recent = {f"{OTHER}.called", f"{OTHER}.lock", "01234567.tmp", f"{elsewhere}.sock"}
    for name in recent:
        (folder.path / name).touch()
    os.utime(folder.path / f"{elsewhere}.sock", (time.time() - 24 * 3600,) * 2)
    folder.remember_call(NAME)
    assert files(folder) == recent | {f"{NAME}.called"}
    assert folder.names() == []


# Names.


def test_names_depend_on_key_boot_and_computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(NAME) == 16
    assert set(NAME) <= set("0123456789abcdef")
    names = {socket_name("a"), socket_name("b"), socket_name("\udcff")}
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    names.add(socket_name("a"))
    assert processor.boot_id() == processor.boot_id() != ""
    monkeypatch.setattr(processor, "_BOOT_ID", tmp_path / "nothing")
    names.add(socket_name("a"))
    assert processor.boot_id() == ""
    assert len(names) == 5


def test_windows_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert not place.supported()
    assert open_folder(create=True) is None
