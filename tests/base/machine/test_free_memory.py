"""Tests of how much memory is free, for the system and for a container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.base.machine.memory import free_memory, whole_memory


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Simulate a container with a control group of version 2."""
    for folder in ("proc/self", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    return tmp_path


def put(system: Path, **texts: str | None) -> None:
    """Write the files whose text is known. Underscores stand for dots, and `meminfo` is in another folder."""
    for name, text in texts.items():
        path = "proc/meminfo" if name == "meminfo" else f"sys/fs/cgroup/{name.replace('_', '.')}"
        if text is not None:
            (system / path).write_text(text)


def test_this_machine_has_some() -> None:
    assert (free_memory() or 0) > 1 << 20


def test_what_a_container_holds_of_files_is_free(system: Path) -> None:
    stat = "anon 2000\nfile 6000\ninactive_file 4000\nactive_file 1500\n"
    put(system, memory_max="9000", memory_current="8000", memory_stat=stat)
    assert free_memory(root=system) == 9000 - 8000 + 5500


def test_memory_above_memory_high_is_not_free(system: Path) -> None:
    put(system, memory_max="9000", memory_high="5000", memory_current="3000")
    assert (free_memory(root=system), whole_memory(system)) == (2000, 5000)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS maps more than this at the start of every process")
def test_the_rest_of_the_address_space_is_a_limit() -> None:
    """`ulimit -v` sets it."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
    code += "from llmrun.base.machine.memory import free_memory; print(free_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 28 < int(done.stdout) < 1 << 30


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:  4 kB\n", None, None, 4096),
        ("MemAvailable: 4 kB", "max", "1000", 4096),
        ("MemAvailable: 4 kB", "3000", "1000", 2000),
        ("MemAvailable: 4 kB", "3000", "5000", 0),
        ("MemTotal: 9 kB", "3000", "1000", 2000),
        ("MemAvailable: many", None, None, None),
        (None, None, None, None),
    ],
)
def test_the_smaller_of_what_is_known(
    system: Path, meminfo: str | None, limit: str | None, used: str | None, expected: int | None
) -> None:
    put(system, meminfo=meminfo, memory_max=limit, memory_current=used)
    assert free_memory(root=system) == expected


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:  4 kB\n", None, 9216),
        ("MemTotal: 9 kB", "3000", 3000),
        ("MemTotal: 9 kB", "max", 9216),
        (None, "3000", 3000),
        (None, None, None),
    ],
)
def test_all_memory_is_the_machines_or_a_containers_share(
    system: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    put(system, meminfo=meminfo, memory_max=limit)
    assert whole_memory(system) == expected
