"""Tests of the parent's side of child processes. test_load.py tests what remains of them, and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmrun.base.errors import LlmrunError
from llmrun.base.processes import commands
from llmrun.base.processes.child import AsyncChild, Child
from llmrun.base.processes.frames import FrameTooLong

LONGEST = 1 << 24
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
READ = "def read(): return sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), 'big'))\n"
SAY = "def say(data): sys.stdout.buffer.write(len(data).to_bytes(8, 'big') + data); sys.stdout.buffer.flush()\n"
ECHO = "while data := read(): say(data)"


def command(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", f"import os, sys, time\n{READ}{SAY}{program}"]


@contextlib.contextmanager
def child(program: str, **options: object) -> Iterator[Child]:
    made = Child(command(program), **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.end(0)


def is_gone(pid: int) -> bool:
    """Wait until a process that is not this process's child has ended."""
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_frames_go_there_and_back() -> None:
    with child(ECHO) as echo:
        for data in (b"a", b"\x00" * 65536, bytes(range(256)) * 30_000):
            sending = threading.Thread(target=echo.send, args=(data,))
            sending.start()
            assert echo.receive(LONGEST) == data
            sending.join()
        assert not echo.ended()
        echo.end(10)
        assert (echo.ended(), echo.status) == (True, 0)
        assert echo.receive(LONGEST) is None
        echo.send(b"nobody listens")
        echo.end(10)


def test_an_ending_is_one_line() -> None:
    with child("sys.stderr.write('first\\n\\x1b[31mwhy\\n\\n'); sys.exit(3)") as dying:
        assert dying.receive(LONGEST) is None
        assert dying.wait(10)
        assert dying.ending() == "exit status 3: \\x1b[31mwhy"
        assert dying.last_words.startswith("first")
    with child("time.sleep(60)") as sleeping:
        assert sleeping.ending() == ""


@posix
def test_an_ending_by_a_signal_names_it() -> None:
    with child("os.kill(os.getpid(), 11)") as dying:
        assert dying.wait(10)
        assert dying.ending() == "SIGSEGV"


def test_only_the_end_of_stderr_is_kept() -> None:
    with child("sys.stderr.write('x' * 1_000_000 + 'end'); sys.stderr.flush(); say(b'')", kept_stderr=100) as loud:
        assert loud.receive(LONGEST) == b""
        loud.kill()
        assert loud.wait(10)
        assert loud.last_words == "x" * 97 + "end"
    with child("sys.stderr.write('x'); sys.exit(1)", kept_stderr=0) as silent:
        assert silent.wait(10)
        assert silent.ending() == "exit status 1"


@posix
def test_a_process_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(LlmrunError, match=r"^cannot start a test: /no/such/program: No such file"):
        Child(["/no/such/program"], purpose="a test")
    with pytest.raises(LlmrunError, match=r"^cannot start a\\x1bb: No such file"):
        Child(["a\x1bb"])
    with pytest.raises(LlmrunError, match=r"cannot start .*: embedded null byte"):
        Child([sys.executable, "\x00"])


def test_environment_and_folder_are_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_A", "1")
    monkeypatch.setenv("NUMBA_B", "1")
    program = "say(f\"{os.environ.get('LLMRUN_A')} {os.environ.get('NUMBA_B')} {os.getcwd()}\".encode())"
    with child(program, folder=tmp_path) as usual:
        assert usual.receive(LONGEST) == f"1 None {tmp_path}".encode()
    with child(program, environment={**commands.isolated_environment(), "NUMBA_B": "2"}, folder=tmp_path) as other:
        assert other.receive(LONGEST) == f"None 2 {tmp_path}".encode()


@posix
@pytest.mark.parametrize("group", [commands.in_own_session, commands.in_own_group])
def test_ctrl_c_does_not_reach_a_child(group: Callable[[], object]) -> None:
    if sys.platform == "win32":
        return
    with child("read()", group=group) as waiting:
        assert os.getpgid(waiting.pid) == waiting.pid != os.getpgid(0)
        assert (os.getsid(waiting.pid) == waiting.pid) == (group.__name__ == "in_own_session")


PARENT = "import subprocess; made = subprocess.Popen(['sleep', '60']); say(str(made.pid).encode())\n"


@posix
@pytest.mark.parametrize("ending", ["time.sleep(60)", "sys.exit(0)"])
def test_kill_and_end_reach_descendants(ending: str) -> None:
    for end in (Child.kill, lambda made: made.end(0)):
        with child(PARENT + ending) as made:
            descendant = int(made.receive(LONGEST) or b"0")
            end(made)
            assert made.wait(10)
            assert is_gone(descendant)


@posix
def test_an_ended_child_has_no_descendants() -> None:
    with child(PARENT + "os._exit(0)") as made:
        descendant = int(made.receive(LONGEST) or b"0")
        assert made.wait(10)
        assert is_gone(descendant)


@posix
def test_a_child_that_ignores_everything_is_killed() -> None:
    program = "import signal; signal.signal(15, signal.SIG_IGN); say(b''); time.sleep(60)"
    with child(program) as stubborn:
        stubborn.receive(LONGEST)
        stubborn.end(0.05)
        assert stubborn.ending() == "SIGKILL"
    with child("say(b''); time.sleep(60)") as asleep:
        asleep.receive(LONGEST)
        asleep.end(0.05)
        assert asleep.ending() == "SIGTERM"


def test_a_child_ends_with_its_object() -> None:
    made = Child(command("read()"))
    pid = made.pid
    del made
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "1 / 0"])
def test_a_child_ends_with_its_parent(ending: str) -> None:
    program = (
        "import sys\nfrom llmrun.base.processes.child import Child\n"
        "made = Child([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"print(made.pid, flush=True)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert is_gone(int(done.stdout))


def test_long_frames_are_refused() -> None:
    with child("say(b'x' * 1000); read()") as made, pytest.raises(FrameTooLong):
        made.receive(999)


# --- in an event loop


def test_an_event_loop_talks_to_a_child() -> None:
    async def talk() -> None:
        made = await AsyncChild.start(command(ECHO))
        for data in (b"a", bytes(range(256)) * 30_000):
            made.send(data)
            assert await made.receive(LONGEST) == data
        made.send(b"x" * 100)
        with pytest.raises(FrameTooLong):
            await made.receive(99)
        assert await made.end() == "SIGKILL"
        assert await made.receive(LONGEST) is None
        made.send(b"nobody listens")
        made.kill()

    asyncio.run(talk())


def test_an_event_loop_sees_how_a_child_ends() -> None:
    async def endings() -> list[str]:
        found = []
        for program in (
            "sys.exit(3)",
            "say(b'x' * 1_000_000); sys.exit(4)",
            "sys.stdout.buffer.write(b'12'); sys.exit(5)",
        ):
            made = await AsyncChild.start(command(program))
            found.append(await made.end(20))
            assert await made.receive(LONGEST) is None
        return found

    assert asyncio.run(endings()) == [f"exit status {status}" for status in (3, 4, 5)]
    with pytest.raises(LlmrunError, match=r"^cannot start a test: /no/such/program: No such file"):
        asyncio.run(AsyncChild.start(["/no/such/program"], purpose="a test"))


@posix
def test_an_event_loop_kills_descendants() -> None:
    async def killed() -> int:
        made = await AsyncChild.start(command(PARENT + "time.sleep(60)"))
        descendant = int(await made.receive(LONGEST) or b"0")
        assert await made.end() == "SIGKILL"
        return descendant

    assert is_gone(asyncio.run(killed()))


LETS_GO = "read(); nothing = os.open(os.devnull, os.O_RDWR)\nfor each in (0, 1, 2): os.dup2(nothing, each)\n"


@posix
def test_a_released_child_lives_on() -> None:
    with child(LETS_GO + "time.sleep(60)") as made:
        made.send(b"go")
        process = psutil.Process(made.pid)
        time.sleep(0.1)
        made.release()
        began = time.monotonic()
        made.end(0)
        assert time.monotonic() - began < 0.5  # nothing waits for the child or its stderr
        del made
        gc.collect()
        assert process.is_running()
        process.kill()


@posix
def test_a_released_child_does_not_remain_as_a_zombie() -> None:
    with child(LETS_GO + "time.sleep(0.2)") as made:
        made.send(b"go")
        made.release()
        pid = made.pid
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
