"""Tests of what the system knows about this process. Systems other than Linux report less."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from llmrun.base.machine.own_process import (
    ThreadCosts,
    huge_and_anonymous_bytes,
    seconds_since_start,
    thread_costs,
)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports this")

ROLLUP = """55638c2ed000-7ffcb2718000 ---p 00000000 00:00 0                          [rollup]
Rss:             1236840 kB
Anonymous:       1174400 kB
AnonHugePages:   1107968 kB
Locked:                0 kB
"""


def system(tmp_path: Path, name: str, text: str) -> Path:
    """Return a root directory whose `proc/self/NAME` has this text."""
    file = tmp_path / "proc/self" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return tmp_path


@on_linux
def test_start_of_the_process_is_known_to_a_tick() -> None:
    expected = time.time() - psutil.Process().create_time()
    assert seconds_since_start() == pytest.approx(expected, abs=1.5)  # psutil rounds the time of boot to a second


@on_linux
def test_names_of_processes_may_contain_parentheses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.clock_gettime", lambda clock: 50.0)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    fields = " ".join(["S", *map(str, range(4, 22)), "4800", "0"])
    assert seconds_since_start(system(tmp_path, "stat", f"7 (a) b) 1 (c) {fields}\n")) == 2.0


def test_unreadable_system_files_give_no_numbers(tmp_path: Path) -> None:
    assert seconds_since_start(tmp_path) is None
    assert huge_and_anonymous_bytes(tmp_path) is None
    assert seconds_since_start(system(tmp_path, "stat", "7 (python) S 1")) is None
    assert huge_and_anonymous_bytes(system(tmp_path, "smaps_rollup", "Anonymous: 0 kB\nAnonHugePages: 0 kB\n")) is None


def test_huge_pages_are_distinguished_from_other_memory(tmp_path: Path) -> None:
    assert huge_and_anonymous_bytes(system(tmp_path, "smaps_rollup", ROLLUP)) == (1107968 << 10, 1174400 << 10)


def test_threads_count_only_their_own_page_faults() -> None:
    """The thread touches 200 small pages, and its creator none."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    costs: list[ThreadCosts | None] = []

    def touch() -> None:
        with mmap.mmap(-1, 200 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            for start in range(0, len(memory), mmap.PAGESIZE):
                memory[start] = 1
        costs.append(thread_costs())

    before = thread_costs()
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    after = thread_costs()
    assert before is not None
    assert after is not None
    assert costs[0] is not None
    assert costs[0].page_faults >= 200 > after.page_faults - before.page_faults
