"""Tests that a measurement knows whether other programs, the host or a container's limit took its CPU time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from llmrun.base.machine import load
from llmrun.base.machine.load import Load, disturbance, reading, watched
from llmrun.base.machine.memory import throttled_seconds


class Times(NamedTuple):
    user: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


@pytest.mark.parametrize(
    ("busy", "own", "processors", "threads", "is_disturbed"),
    [
        (2.0, 2.0, 2, 2, False),  # our threads alone
        (2.0, 1.33, 2, 2, True),  # another program on one of two processors
        (2.2, 2.0, 2, 2, False),
        (3.0, 2.0, 8, 2, False),  # other programs have enough processors of their own
        (7.5, 2.0, 8, 2, True),
        (1.0, 2.0, 2, 2, False),  # CPU times are counted in ticks, so the difference may be negative
        (None, 2.0, 2, 2, False),  # unknown
    ],
)
def test_other_programs_disturb_if_they_take_our_processors(
    busy: float | None, own: float, processors: int, threads: int, is_disturbed: bool
) -> None:
    words = disturbance(Load(processors, 1.0, busy, own), threads)
    assert bool(words) == is_disturbed
    if is_disturbed:
        assert words.startswith("other programs used ")


def test_stolen_time_disturbs() -> None:
    assert disturbance(Load(2, 1.0, 1.8, 1.8, stolen=0.2), 2) == "other virtual machines took 10% of the CPU time"
    assert disturbance(Load(2, 1.0, 1.98, 1.98, stolen=0.02), 2) == ""


def test_an_empty_interval_is_quiet() -> None:
    assert disturbance(Load(2), 2) == ""


def limited(root: Path, quota: str, throttled: str) -> Path:
    """Return a root whose control group has a CPU limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (root / "proc/self/mountinfo").write_text("30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = root / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    (group / "cpu.stat").write_text(f"usage_usec 1\nthrottled_usec {throttled}\n")
    return root


def test_a_containers_limit_disturbs_if_others_used_it_up(tmp_path: Path) -> None:
    root = limited(tmp_path, "200000 100000", "2500000")
    assert throttled_seconds(root) == 2.5
    others = Load(8, 1.0, 2.0, 1.0, throttled=0.4)
    assert disturbance(others, 2, root) == "other programs used the container's limit of 2 CPUs"
    alone = Load(8, 1.0, 2.0, 2.0, throttled=0.4)  # real runs would be stopped just as often
    assert disturbance(alone, 2, root) == ""
    assert disturbance(others, 2, tmp_path / "no groups") == ""


def test_only_our_own_processors_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = [Times(100, 1), Times(10.0, 50.0, 2.0, 3.0), Times(100, 1), Times(20.0, 40.0, 1.0, 0.5)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(load, "allowed_processors", lambda: [1, 3])
    found = reading(tmp_path)
    assert (found.processors, found.busy, found.stolen) == (2, 30.0, 3.5)


def test_intervals_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(
        [Load(2, 10.0, 5.0, 3.0), Load(2, 11.0, 7.0, 4.0), Load(2, 20.0, 9.0, 4.5), Load(2, 20.5, 9.5, 5.0)]
    )
    monkeypatch.setattr(load, "reading", lambda root: next(readings))
    total = Load.empty()
    for _ in range(2):
        with watched(total):
            pass
    assert (total.wall, total.busy, total.own) == (1.5, 2.5, 1.5)


def test_unknown_times_stay_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(percpu: bool) -> list[Times]:
        raise NotImplementedError

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    total = Load.empty()
    with watched(total, tmp_path):
        pass
    assert total.busy is None
    assert disturbance(total, 2, tmp_path) == ""
