"""Tests of the default number of threads: physical cores, limited by the process's affinity and quota."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from llmrun.base.machine.cpu_count import default_threads, most_threads


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def put_cores(root: Path, siblings: Sequence[str], capacities: Sequence[int] = ()) -> None:
    """Write the list of siblings, and the capacity, of each logical processor."""
    for cpu, text in enumerate(siblings):
        put(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    for cpu, capacity in enumerate(capacities):
        put(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))


def allow(monkeypatch: pytest.MonkeyPatch, cpus: Collection[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cpus), raising=False)


def put_group(root: Path, cpu_max: str) -> None:
    """Put this process into a group of version 2 with a limit, as in a container."""
    put(root, "proc/self/cgroup", "0::/")
    put(root, "proc/self/mountinfo", "41 31 0:38 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw")
    put(root, "sys/fs/cgroup/cpu.max", cpu_max)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate eight logical processors, two per core (0 and 4, 1 and 5, ...), outside a container."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    allow(monkeypatch, range(8))
    put_cores(tmp_path, [f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)])
    return tmp_path


def test_one_thread_a_physical_core(machine: Path) -> None:
    assert default_threads(machine) == 4


@pytest.mark.parametrize(
    ("allowed", "threads"), [({0}, 1), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 4, 5}, 2), ({1, 2, 7}, 3)]
)
def test_only_cores_this_process_may_run_on(
    machine: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], threads: int
) -> None:
    allow(monkeypatch, allowed)
    assert default_threads(machine) == threads


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
    put_group(machine, limit)
    assert default_threads(machine) == threads


def test_as_many_can_run_at_once_as_there_are_logical_processors_or_the_quota_gives(machine: Path) -> None:
    assert most_threads(machine) == 8
    put_group(machine, "300000 100000")
    assert most_threads(machine) == 3


def test_without_a_topology_every_processor_counts(machine: Path) -> None:
    assert default_threads(machine / "nowhere") == 8


def test_a_system_without_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert default_threads(machine) == 4


def test_a_system_that_does_not_say_how_many(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(machine) == 1


def test_a_forbidden_affinity_call_is_no_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes may forbid it with seccomp."""

    def refuse(process: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert default_threads(machine) == 4
    assert most_threads(machine) == 8


@pytest.mark.parametrize(
    ("allowed", "threads"), [(range(16), 6), (range(4, 16), 4), ({12, 13}, 2), ({0, 2, 4, 12}, 4), (range(11), 6)]
)
def test_slow_cores_do_not_count_beside_four_fast_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: Collection[int], threads: int
) -> None:
    """Simulate an Intel processor with 6 performance cores of two threads each, and 4 efficiency cores."""
    put_cores(tmp_path, [f"{cpu & ~1}-{cpu | 1}" for cpu in range(12)] + [str(cpu) for cpu in range(12, 16)])
    put(tmp_path, "sys/devices/cpu_core/cpus", "0-11")
    put(tmp_path, "sys/devices/cpu_atom/cpus", "12-15")
    allow(monkeypatch, allowed)
    assert default_threads(tmp_path) == threads


@pytest.mark.parametrize(
    ("capacities", "threads"),
    [
        ([1024] * 4 + [446] * 4, 4),  # like the RK3588: Cortex-A76 and A55
        ([1024] * 8, 8),
        ([1024] * 2 + [446] * 6, 8),  # two fast cores are too few
        ([1024] * 4 + [905] * 4, 8),  # like cores of the same kind with a lower frequency
        ([1024] + [920] * 3 + [450] * 4, 4),
    ],
)
def test_cores_with_little_capacity_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacities: list[int], threads: int
) -> None:
    put_cores(tmp_path, [str(cpu) for cpu in range(8)], capacities)
    allow(monkeypatch, range(8))
    assert default_threads(tmp_path) == threads


def test_cores_of_unknown_capacity_count_as_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_cores(tmp_path, [str(cpu) for cpu in range(8)], [1024] * 4 + [446])
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpu_capacity", "")
    allow(monkeypatch, range(8))
    assert default_threads(tmp_path) == 7


def test_processors_that_are_switched_off_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not in the affinity mask, and have no topology."""
    put_cores(tmp_path, ["0", "1,5", "2,6", "3,7", "", "1,5", "2,6", "3,7"])
    allow(monkeypatch, {0, 1, 2, 3, 5, 6, 7})
    assert default_threads(tmp_path) == 4


def test_cores_of_all_numa_nodes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of 64 cores with two threads each. The kernel lists siblings in pairs, not in a range."""
    put_cores(tmp_path, [f"{cpu % 128},{cpu % 128 + 128}" for cpu in range(256)])
    allow(monkeypatch, range(256))
    assert default_threads(tmp_path) == 128
    allow(monkeypatch, {*range(64), *range(128, 192)})  # one node
    assert default_threads(tmp_path) == 64


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_process_bound_to_one_processor_uses_one_thread() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from llmrun.base.machine.cpu_count import default_threads, most_threads; "
    code += "print(default_threads(), most_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
