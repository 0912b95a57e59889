"""Tests of how much memory is free, for the system and for a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.machine import free_memory as module
from llmrun.machine.free_memory import free_memory, whole_memory


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    return tmp_path


def test_this_machine_has_some() -> None:
    assert (free_memory() or 0) > 1 << 20


def test_what_a_container_holds_of_files_is_free(system: Path) -> None:
    for name, text in (("memory.max", "9000"), ("memory.current", "8000")):
        (system / name).write_text(text)
    (system / "memory.stat").write_text("anon 2000\nfile 6000\ninactive_file 4000\nactive_file 1500\n")
    assert free_memory() == 9000 - 8000 + 5500


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
    for name, text in (("meminfo", meminfo), ("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (system / name).write_text(text)
    assert free_memory() == expected


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
    for name, text in (("meminfo", meminfo), ("memory.max", limit)):
        if text is not None:
            (system / name).write_text(text)
    assert whole_memory() == expected
