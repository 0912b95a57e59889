"""Load tests of child processes: hostile and dying ones, dying parents, and a thousand of them. Nothing may be left.

Each test is followed by a count of this process's descendants, descriptors and threads, and of temporary files.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrun.base.errors import LlmrunError
from llmrun.base.processes import commands
from llmrun.base.processes.child import AsyncChild, Child, _Tail
from llmrun.base.processes.frames import BadMessage, Codec, FrameTooLong
from llmrun.base.processes.limits import IsolatedProcess, ProcessFailed, ProcessLimits

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

LONGEST = 1 << 16
VALUES: Codec[dict[str, int]] = Codec(dict[str, int])
LIMITS = ProcessLimits(cpu_s=5.0, wall_s=0.5, memory=256_000_000, output=LONGEST)
HELPERS = """
import os, sys, time
def read(): return sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), 'big'))
def out(data): sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
def say(data): out(len(data).to_bytes(8, 'big') + data)
"""


def command(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", HELPERS + program]


@dataclass(frozen=True)
class Left:
    """Everything that this process holds: descendants, open files by descriptor, threads, and temporary files."""

    processes: tuple[int, ...]
    files: tuple[str, ...]
    threads: tuple[str, ...]
    temporary: tuple[str, ...]

    @classmethod
    def now(cls) -> Left:
        gc.collect()
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of this iteration
                links.append(f"{entry.name} {entry.readlink()}")
        return cls(
            tuple(child.pid for child in psutil.Process().children(recursive=True)),
            tuple(sorted(link for link in links if "/proc/" not in link)),
            tuple(thread.name for thread in threading.enumerate()),
            tuple(sorted(os.listdir(tempfile.gettempdir()))),  # noqa: PTH208
        )


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = Left.now()
    yield
    assert Left.now() == before


@contextlib.contextmanager
def child(program: str) -> Iterator[Child]:
    made = Child(command(program))
    try:
        yield made
    finally:
        made.end(0)


def is_gone(pid: int, seconds: float = 20.0) -> bool:
    """Wait until a process that is not this process's child has ended."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --- children that die, at every message

DEATHS = {
    "exits": "sys.exit(3)",
    "is killed": "os.kill(os.getpid(), 9)",
    "crashes": "os.abort()",
    "exits in a frame": "out(bytes(7) + b'\\x09half'); os._exit(3)",
    "exits in a header": "out(bytes(5)); os._exit(3)",
    "closes its output": "os.close(1); time.sleep(60)",
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("messages", range(4))
def test_a_child_may_die_at_every_message(death: str, messages: int) -> None:
    with child(f"for _ in range({messages}): say(read())\n{DEATHS[death]}") as dying:
        for number in range(messages):
            dying.send(VALUES.encode({"n": number}))
            assert VALUES.decode(dying.receive(LONGEST) or b"") == {"n": number}
        dying.send(bytes(1000))
        assert dying.receive(LONGEST) is None
        assert dying.receive(LONGEST) is None
        dying.send(b"nobody listens")


@pytest.mark.parametrize("death", DEATHS)
def test_a_child_in_an_event_loop_may_die_at_every_message(death: str) -> None:
    async def talk(messages: int) -> None:
        program = f"for _ in range({messages}): say(read())\n{DEATHS[death]}"
        dying = await AsyncChild.start(command(program))
        for number in range(messages):
            dying.send(VALUES.encode({"n": number}))
            assert VALUES.decode(await dying.receive(LONGEST) or b"") == {"n": number}
        dying.send(bytes(1000))
        assert await dying.receive(LONGEST) is None
        dying.send(b"nobody listens")
        await dying.end()

    for messages in range(3):
        asyncio.run(talk(messages))


# --- children that lie

NOISE = random.Random(7).randbytes(4096)
LIES: dict[str, tuple[str, type[Exception]]] = {
    "garbage": (f"out({NOISE!r})", FrameTooLong),
    "text": ("print('Traceback (most recent call last)', flush=True)", FrameTooLong),
    "a frame of 1 GB": ("out((1 << 30).to_bytes(8, 'big'))", FrameTooLong),
    "a frame of 2**62 bytes": ("out((1 << 62).to_bytes(8, 'big') + bytes(9))", FrameTooLong),
    "a frame of 2**64 - 1 bytes": ("out(b'\\xff' * 8)", FrameTooLong),
    "a frame of garbage": (f"say({NOISE!r})", BadMessage),
    "an empty frame": ("say(b'')", BadMessage),
    "another message": ("say(b'\\x81\\xa1n\\xa1x')", BadMessage),
    "a list of 4 billion": ("say(b'\\xdd\\xff\\xff\\xff\\xff')", BadMessage),
    "a deep list": ("say(b'\\x91' * 65_000)", BadMessage),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_child_is_refused_at_once(lie: str) -> None:
    program, error = LIES[lie]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with child(f"{program}\ntime.sleep(60)") as lying, pytest.raises(error):
        VALUES.decode(lying.receive(LONGEST) or b"")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 50_000  # kB


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_child_in_an_event_loop_is_refused_at_once(lie: str) -> None:
    program, error = LIES[lie]

    async def talk() -> None:
        lying = await AsyncChild.start(command(f"{program}\ntime.sleep(60)"))
        with pytest.raises(error):
            VALUES.decode(await lying.receive(LONGEST) or b"")
        assert await lying.end() == "SIGKILL"

    asyncio.run(talk())


@pytest.mark.parametrize("silent", ["time.sleep(60)", "out(bytes(4)); time.sleep(60)", "while True: read()"])
def test_a_silent_child_is_ended_from_another_thread(silent: str) -> None:
    with child(silent) as made:
        timer = threading.Timer(0.1, made.kill)
        timer.start()
        made.send(b"?")
        assert made.receive(LONGEST) is None
        timer.join()


def test_a_child_that_reads_nothing_is_ended_from_another_thread() -> None:
    with child("time.sleep(60)") as made:
        timer = threading.Timer(0.1, made.kill)
        timer.start()
        made.send(bytes(1 << 20))
        timer.join()
        assert made.wait(10)


def test_a_silent_child_in_an_event_loop_can_be_given_up() -> None:
    async def talk() -> None:
        made = await AsyncChild.start(command("out(bytes(4)); time.sleep(60)"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.receive(LONGEST), 0.1)
        made.send(bytes(1 << 20))
        assert await made.end() == "SIGKILL"

    asyncio.run(talk())


@pytest.mark.push
@pytest.mark.parametrize("lie", [*LIES, *DEATHS, "nothing"])
def test_an_isolated_process_may_do_anything(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[str, Any] = {**DEATHS, **{name: program for name, (program, _) in LIES.items()}, "nothing": "pass"}
    for ready in ("", "say(b''); read(); read()\n"):
        program = command(f"{ready}{programs[lie]}\ntime.sleep(60)")
        monkeypatch.setattr(commands, "isolated_command", lambda _, program=program: program)
        process = IsolatedProcess("none", "a test")
        before = Left.now()
        with pytest.raises(ProcessFailed) as failed:
            process.request(b"{}", LIMITS, ["verdict"])
        assert Left.now() == before
        assert "\n" not in str(failed.value)
        process.close()


def test_a_flood_of_stderr_takes_no_memory() -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with child("for _ in range(100): sys.stderr.write('x' * 1_000_000)\nsay(b'')") as loud:
        assert loud.receive(LONGEST) == b""
        loud.end(10)
        assert loud.last_words == "x" * 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 50_000  # kB


# --- parents that die

PARENT = """
import asyncio, sys, time
from llmrun.base.processes.child import AsyncChild, Child
from llmrun.base.processes.limits import IsolatedProcess
program = "from llmrun.base.processes.worker import serve\\nimport os, time\\n" + sys.argv[1] + "\\nserve(answer)"
command = [sys.executable, "-c", program]
"""
STARTS = {
    "in a thread": "made = Child(command); made.send(b'work'); print(made.pid, flush=True); time.sleep(60)",
    "in an event loop": (
        "async def run():\n made = await AsyncChild.start(command)\n made.send(b'work')\n"
        " print(made.pid, flush=True)\n await asyncio.sleep(60)\nasyncio.run(run())"
    ),
    "isolated": (
        "made = IsolatedProcess('engine.constraint.validation_worker', 'a test')\nmade.start()\n"
        "print(made._running().pid, flush=True)\ntime.sleep(60)"
    ),
}
ANSWERS = {
    "idle": "answer = bytes",
    "asleep": "def answer(request): time.sleep(60)",
    "busy": "def answer(request):\n while True: pass",
}


@pytest.mark.push
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", ANSWERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_when_its_parent_is_killed(start: str, state: str, number: signal.Signals) -> None:
    if start == "isolated" and state != "idle":
        return  # it works only within its limits on processor time
    with subprocess.Popen(
        [sys.executable, "-c", PARENT + STARTS[start], ANSWERS[state]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)  # until the child works
        assert psutil.pid_exists(pid)
        parent.send_signal(number)
        parent.communicate(timeout=20)
    assert is_gone(pid, 5.0)


@pytest.mark.parametrize("program", ["read()", "sys.exit(3)", "time.sleep(60)"])
def test_an_ended_child_holds_nothing(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _Tail._read

    def read_slowly(*arguments: Any) -> None:
        read(*arguments)
        time.sleep(0.2)

    monkeypatch.setattr(_Tail, "_read", read_slowly)
    before = Left.now()
    made = Child(command(program))
    assert Left.now() != before
    made.end(0.5)
    made.end(0.5)
    assert Left.now() == before
    assert made.receive(LONGEST) is None


# --- many of them

QUICK = [sys.executable, "-I", "-S", "-c", "pass"]
ENDS: dict[str, Callable[[Child], object]] = {
    "ended": lambda made: made.end(20),
    "killed": lambda made: made.end(0),
    "collected": lambda made: None,
    "waited for": lambda made: (made.wait(20), made.last_words),
}


SLOW = ("ended", "waited for")  # Python's own wait sleeps up to 50 ms


@pytest.mark.parametrize(
    "end", [pytest.param(n, marks=pytest.mark.night if n in SLOW else pytest.mark.push) for n in ENDS]
)
def test_a_thousand_children_leave_nothing(end: str) -> None:
    for _ in range(1000):
        ENDS[end](Child(QUICK))


@pytest.mark.push
def test_a_thousand_children_at_a_time_leave_nothing() -> None:
    """At a time means fifty, because this process may have a thousand descriptors."""
    for _ in range(20):
        made = [Child(command("say(read())")) for _ in range(50)]
        for each in made:
            each.send(b"x")
        assert [each.receive(LONGEST) for each in made] == [b"x"] * 50
        for each in made:
            each.end(20)
        assert [each.status for each in made] == [0] * 50


@pytest.mark.push
def test_a_thousand_children_of_an_event_loop_leave_nothing() -> None:
    async def run() -> None:
        for _ in range(20):
            made = await asyncio.gather(*(AsyncChild.start(command("say(read())")) for _ in range(50)))
            for each in made:
                each.send(b"x")
            assert await asyncio.gather(*(each.receive(LONGEST) for each in made)) == [b"x"] * 50
            await asyncio.gather(*(each.end() for each in made))

    asyncio.run(run())


@pytest.mark.push
def test_a_thousand_failed_starts_leave_nothing() -> None:
    for _ in range(1000):
        with pytest.raises(LlmrunError):
            Child(["/no/such/program"], purpose="a test")


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            Child(command("time.sleep(60)"))
