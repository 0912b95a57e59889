"""Tests of the child's side of child processes."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from llmrun.base.processes import commands
from llmrun.base.processes.child import Child

LONGEST = 1 << 20
SERVE = "from llmrun.base.processes.worker import serve\nimport os, sys, time\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def serving(answer: str) -> Child:
    """Return a child that serves with a function `answer(request)`, given its body."""
    return Child([sys.executable, "-c", f"{SERVE}def answer(request):\n {answer}\nserve(answer)"])


def test_a_worker_answers_until_the_parent_closes_the_pipe() -> None:
    made = serving("print('noise'); os.write(1, b'noise'); return request[::-1]")
    try:
        for request in (b"", b"abc", bytes(range(256)) * 100):
            made.send(request)
            assert made.receive(LONGEST) == request[::-1]
        made.end(20)
        assert made.status == 0
        assert "noise" in made.last_words
    finally:
        made.end(0)


def test_a_worker_that_fails_says_why() -> None:
    made = serving("return 1 / 0")
    made.send(b"")
    assert made.receive(LONGEST) is None
    assert made.wait(20)
    assert made.ending() == "exit status 1: ZeroDivisionError: division by zero"
    made.end(0)


LATE = """
import select
real_poll = select.poll
class LatePoll:
    def register(self, *arguments):
        self.arguments = arguments
    def poll(self):
        time.sleep(0.1)
        made = real_poll()
        made.register(*self.arguments)
        made.poll()
select.poll = LatePoll
sys.excepthook = lambda *error: (time.sleep(0.3), sys.__excepthook__(*error))
def answer(request):
    1 / 0
serve(answer)
"""


@linux
def test_a_worker_that_fails_before_it_watches_its_parent_says_why() -> None:
    """On a busy machine, the thread that watches the pipe may begin after the work has failed."""
    made = Child([sys.executable, "-c", SERVE + LATE])
    made.send(b"")
    assert made.receive(LONGEST) is None
    assert made.wait(20)
    made.end(0)
    assert made.ending() == "exit status 1: ZeroDivisionError: division by zero"


@linux
def test_a_worker_has_no_ctrl_c_no_core_file_and_no_shared_pipes() -> None:
    if sys.platform == "win32":
        return
    limits_and_pipes = "resource.getrlimit(resource.RLIMIT_CORE), any(map(os.get_inheritable, (3, 4)))"
    made = serving(f"import resource; return repr(({limits_and_pipes})).encode()")
    made.send(b"")
    limits, is_shared = eval((made.receive(LONGEST) or b"").decode())
    assert limits == (0, 0)
    assert not is_shared
    os.kill(made.pid, signal.SIGINT)
    made.send(b"")
    assert made.receive(LONGEST) is not None
    made.end(0)


@linux
def test_a_worker_ends_with_its_parent_in_the_middle_of_work() -> None:
    made = serving("time.sleep(60); return b''")
    made.send(b"")
    time.sleep(0.3)  # until it sleeps
    process = psutil.Process(made.pid)
    made.stdin.close()
    assert process.wait(20) == 0
    made.end(0)


def test_a_command_runs_a_module_of_the_package() -> None:
    assert commands.command("a.b", "c") == [sys.executable, "-P", "-m", "llmrun.a.b", "c"]
    assert commands.command("")[-1] == "llmrun"
