"""Tests of an engine in a child process: it answers, or reports in one line why it cannot."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from llmrun.base.errors import BackendCrashed, BadGGUF, LlmrunError, ModelFileError, UsageError
from llmrun.jobs.bench.measuring.pool import WorkerProcess
from llmrun.jobs.bench.measuring.workload import BenchTarget, Room, synthetic
from tests.support.bench.scripts import SHORT, Notes, target_of
from tests.support.gguf.gguf_files import tiny_llama

pytestmark = pytest.mark.push

ROOM = Room(256, 2, to_the_limit=True)


@contextmanager
def worker() -> Iterator[WorkerProcess]:
    found = WorkerProcess(Notes())
    try:
        yield found
    finally:
        found.kill()


def test_it_opens_runs_counts_and_ends(tmp_path: Path) -> None:
    with worker() as process:
        facts = process.open(target_of(tmp_path), ROOM)
        assert (facts["backend"], facts["max_sequences"], facts["compiled"]) == ("scripted", 2, False)
        sample = process.run(SHORT, seed=1)
        assert sample.requests[0].generated_tokens == SHORT.facts.generate
        assert process.peak_memory() > 10 << 20
        process.close()
        with pytest.raises(LlmrunError, match="is closed"):
            process.run(SHORT, seed=2)


def test_the_default_cache_type_is_reported(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    with worker() as process:
        assert process.open(BenchTarget("m", str(path), backend="cpu", threads=1), ROOM)["kv_type"] == "q8_0"


def test_a_warm_up_has_a_time_limit(tmp_path: Path) -> None:
    with worker() as process:
        process.open(target_of(tmp_path, step_seconds=0.05), ROOM)
        assert process.warm(synthetic(4, 100, 0, 1), seed=1, seconds=0.2) is None
        taken = process.warm(SHORT, seed=2, seconds=60)
        assert taken is not None
        assert taken > 0.1


def test_an_error_comes_back_as_what_it_was(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    with worker() as process:
        with pytest.raises((BadGGUF, ModelFileError), match=r"broken\.gguf"):
            process.open(BenchTarget("broken", str(broken), backend="cpu"), ROOM)
        with pytest.raises(UsageError, match="invalid script"):
            process.open(BenchTarget("none", str(tmp_path / "none.json"), backend="scripted"), ROOM)
        process.open(target_of(tmp_path), ROOM)
        assert process.run(SHORT, seed=1).requests


def test_one_that_dies_is_said_to_have_died(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    with worker() as process:
        process.open(target_of(tmp_path), ROOM)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(BackendCrashed, match="died while running a workload: SIGKILL"):
            process.run(SHORT, seed=1)


def test_it_is_not_ended_by_its_terminals_ctrl_c_and_goes_with_its_parent(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs process groups")
    with worker() as process:
        process.open(target_of(tmp_path), ROOM)
        assert os.getpgid(process.pid) != os.getpgid(0)
        status = psutil.Process(process.pid)
        process.close()
        assert not status.is_running() or status.status() == psutil.STATUS_ZOMBIE


def test_the_machines_limits_are_measured_in_it() -> None:
    with worker() as process:
        bandwidth, products = process.limits(1, 64 << 20)
        assert bandwidth > 1e8
        assert products > 1e9


def test_many_requests_at_once_are_all_answered(tmp_path: Path) -> None:
    with worker() as process:
        process.open(target_of(tmp_path), Room(64, 64, to_the_limit=True))
        assert len(process.run(synthetic(4, 3, 0, 64), seed=1).requests) == 64


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('garbage' * 9, flush=True); input()", "sent an invalid message: a message of"),
        ("import os; os.write(1, bytes(7) + b'\\2{}'); input()", "sent an invalid message"),
        ("import sys; sys.exit('no room')", "died while measuring its peak memory: exit status 1: no room"),
        ("import os; os.close(1); input()", "died while measuring its peak memory: exit status 0"),
    ],
)
def test_broken_workers_are_reported(code: str, words: str) -> None:
    process = WorkerProcess(Notes(), [sys.executable, "-S", "-c", code])
    with pytest.raises(BackendCrashed, match=words):
        process.peak_memory()
    process.close()


def test_missing_programs_are_reported() -> None:
    with pytest.raises(LlmrunError, match="cannot start a worker process: /no/such/program: No such file"):
        WorkerProcess(Notes(), ["/no/such/program"])
