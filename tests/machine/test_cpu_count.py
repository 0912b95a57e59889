"""Tests of the default number of threads: physical cores, limited by the process's affinity and quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmrun.machine import cpu_count
from llmrun.machine.cpu_count import default_threads, most_threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate eight logical processors, two per core (0 and 4, 1 and 5, ...), outside a container."""
    monkeypatch.setattr(cpu_count, "_CPUS", tmp_path)
    monkeypatch.setattr(cpu_count, "_CGROUP_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_one_thread_a_physical_core(machine: Path) -> None:
    assert default_threads() == 4


@pytest.mark.parametrize(
    ("allowed", "threads"), [({0}, 1), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 4, 5}, 2), ({1, 2, 7}, 3)]
)
def test_only_cores_this_process_may_run_on(
    machine: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert default_threads() == threads


@pytest.mark.parametrize(
    ("limit", "threads"),
    [
        ("max 100000", 4),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 4),
        ("nonsense", 4),
        ("", 4),
    ],
)
def test_a_containers_quota_is_a_limit(machine: Path, limit: str, threads: int) -> None:
    (machine / "cpu.max").write_text(limit + "\n")
    assert default_threads() == threads


def test_as_many_can_run_at_once_as_there_are_logical_processors_or_the_quota_gives(machine: Path) -> None:
    assert most_threads() == 8
    (machine / "cpu.max").write_text("300000 100000\n")
    assert most_threads() == 3


def test_without_a_topology_every_processor_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_count, "_CPUS", machine / "nowhere")
    assert default_threads() == 8


def test_a_system_without_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert default_threads() == 4


def test_a_system_that_does_not_say_how_many(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads() == 1
