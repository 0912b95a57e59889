"""Tests of when a process in the background gives its memory back."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.machine.memory import MemoryGroup
from llmrun.base.machine.memory_pressure import (
    MemoryReaders,
    PressureWatch,
    fits_beside,
    linux_readers,
    macos_level,
    psutil_readers,
    system_readers,
    volunteer_for_oom,
)
from tests.support.control_groups import in_group, needs_groups, real_group

GB = 10**9
MIB = 1 << 20


def memory(free: float, whole: float, waiting: float = 0.0, level: int = 0) -> MemoryReaders:
    """Return readers of a machine with this memory in GB."""
    group = MemoryGroup(int(whole * GB), int((whole - free) * GB), 0)
    return MemoryReaders(lambda: [group], lambda: waiting, lambda: level)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Simulate a machine with 16 GB of memory, and a control group of version 2 without a limit."""
    for folder in ("proc/self", "proc/pressure", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    put_free(tmp_path, 12_000_000)
    return tmp_path


def put_free(system: Path, kilobytes: int) -> None:
    (system / "proc/meminfo").write_text(f"MemTotal: 15625000 kB\nMemAvailable: {kilobytes} kB\n")


def put_waiting(system: Path, percent: float) -> None:
    text = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    (system / "proc/pressure/memory").write_text(text)


@pytest.mark.parametrize(
    ("free", "whole", "reason"),
    [
        (12, 16, ""),
        (1.3, 16, ""),
        (1.27, 16, "1.27 GB of 16.0 GB memory left"),  # 8 %
        (0, 16, "0 B of 16.0 GB memory left"),
        (1.01, 8, ""),
        (0.99, 8, "990 MB of 8.00 GB memory left"),  # 1 GB
        (0.51, 2, ""),
        (0.49, 2, "490 MB of 2.00 GB memory left"),  # a quarter
        (6, 64, ""),
        (5, 64, "5.00 GB of 64.0 GB memory left"),
    ],
)
def test_little_free_memory_is_a_reason(free: float, whole: float, reason: str) -> None:
    assert PressureWatch(memory(free, whole)).reason() == reason


@pytest.mark.parametrize(
    ("free", "waiting", "reason"),
    [
        (4, 9.0, ""),
        (4, 14.2, "programs wait for memory 14 % of the time"),
        (8, 90.0, ""),  # for example in a container with a small limit
    ],
)
def test_waiting_programs_count_unless_memory_is_free(free: float, waiting: float, reason: str) -> None:
    assert PressureWatch(memory(free, 16, waiting)).reason() == reason


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        (0, ""),
        (1, ""),
        (2, "macOS reports memory pressure: warning"),
        (4, "macOS reports memory pressure: critical"),
    ],
)
def test_the_level_of_macos_is_a_reason(level: int, reason: str) -> None:
    assert PressureWatch(memory(12, 16, level=level)).reason() == reason


def test_unknown_memory_is_no_reason() -> None:
    readers = MemoryReaders(list)
    assert PressureWatch(readers).reason() == ""
    assert not fits_beside(1, readers)


def test_the_scarcest_of_machine_and_groups_counts(system: Path) -> None:
    watch = PressureWatch(linux_readers(system))
    assert watch.reason() == ""
    (system / "sys/fs/cgroup/memory.max").write_text(str(4 * GB))
    (system / "sys/fs/cgroup/memory.current").write_text(str(2 * GB))
    assert watch.reason() == ""
    (system / "sys/fs/cgroup/memory.current").write_text(str(3_500_000_000))
    assert watch.reason() == "500 MB of 4.00 GB memory left"
    put_free(system, 100_000)
    assert watch.reason() == "102 MB of 16.0 GB memory left"


def test_linux_counts_waiting_programs(system: Path) -> None:
    watch = PressureWatch(linux_readers(system))
    put_free(system, 3_000_000)
    assert watch.reason() == ""  # the kernel does not count
    put_waiting(system, 9.99)
    assert watch.reason() == ""
    put_waiting(system, 31.4)
    assert watch.reason() == "programs wait for memory 31 % of the time"


@pytest.mark.parametrize("text", ["", "\n", "some", "some avg10", "full avg10=", "some avg10=much avg60=0.00"])
def test_no_text_of_the_kernel_is_an_error(system: Path, text: str) -> None:
    (system / "proc/pressure/memory").write_text(text)
    assert linux_readers(system).waiting() == 0.0


class FakeClock:
    """Simulates free memory at given times. The clock advances only when a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float) -> None:
        self.now, self.free = 100.0, free
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def groups(self) -> list[MemoryGroup]:
        return list(memory(self.free, 16).groups())


@pytest.mark.parametrize(
    ("before", "after", "pause"),
    [
        (12, 12, 2.0),
        (12, 13, 2.0),
        (12, 11, 2.0),  # 0.5 GB/s: below the bound in 19 s
        (12, 9, 0.5),  # 1.5 GB/s: in 5 s
        (12, 1.5, 0.5),
        (1.8, 1.8, 0.5),  # near the bound
        (2.0, 2.0, 2.0),
    ],
)
def test_shrinking_memory_is_checked_more_often(
    monkeypatch: pytest.MonkeyPatch, before: float, after: float, pause: float
) -> None:
    clock = FakeClock(monkeypatch, before)
    watch = PressureWatch(MemoryReaders(clock.groups))
    watch.reason()
    clock.now, clock.free = clock.now + 2, after
    watch.reason()
    assert watch.pause == pause


@pytest.mark.parametrize(
    ("engine", "free", "whole", "fits"),
    [
        (1, 12, 16, True),
        (8.1, 15, 16, False),  # more than half
        (2, 4, 16, True),
        (2, 3.9, 16, False),  # 1.92 GB must stay free
        (1, 1.6, 2, False),
        (0.3, 1.1, 2, True),
    ],
)
def test_an_engine_fits_if_it_can_stay(engine: float, free: float, whole: float, fits: bool) -> None:
    assert fits_beside(int(engine * GB), memory(free, whole)) == fits
    if fits:
        assert PressureWatch(memory(free - engine, whole)).reason() == ""


def test_no_engine_fits_beside_waiting_programs() -> None:
    assert not fits_beside(GB, memory(4, 16, waiting=20))
    assert not fits_beside(GB, memory(12, 16, level=2))


def test_waiting_ends_with_the_time_or_with_close() -> None:
    watch = PressureWatch(memory(12, 16))
    started = time.monotonic()
    assert watch.wait(0.05) == ""
    threading.Timer(0.05, watch.close).start()
    assert watch.wait(60) == ""
    assert time.monotonic() - started < 2
    assert watch.wait(60) == ""


def test_waiting_ends_with_pressure() -> None:
    looks = iter([memory(1.9, 16), memory(1.5, 16), memory(1.2, 16)])
    watch = PressureWatch(MemoryReaders(lambda: next(looks).groups()))
    watch._closed.wait = lambda timeout=None: False  # type: ignore[method-assign]
    assert watch.wait(60) == "1.20 GB of 16.0 GB memory left"


def test_this_machine_can_be_read() -> None:
    group = system_readers().groups()[0]
    assert 0 < group.free < group.limit
    assert system_readers().waiting() >= 0
    group = psutil_readers().groups()[0]
    assert 0 < group.free < group.limit


@pytest.mark.parametrize(("failed", "level"), [(0, 4), (-1, 0)])
def test_macos_tells_its_level(failed: int, level: int) -> None:
    class Libc:
        @staticmethod
        def sysctlbyname(name: bytes, value: Any, size: Any, new: None, new_size: int) -> int:
            assert (name, size._obj.value) == (b"kern.memorystatus_vm_pressure_level", ctypes.sizeof(ctypes.c_int))
            value._obj.value = 4
            return failed

    assert macos_level(Libc()) == level


if sys.platform == "darwin":

    def test_this_mac_has_a_level() -> None:
        assert macos_level() in (1, 2, 4)


def test_the_kernel_kills_volunteers_first(tmp_path: Path) -> None:
    file = tmp_path / "proc/self/oom_score_adj"
    file.parent.mkdir(parents=True)
    volunteer_for_oom(tmp_path)
    assert not file.exists()  # as on other systems
    file.write_text("0\n")
    volunteer_for_oom(tmp_path)
    assert file.read_text().strip() == "1000"


# Real processes. An engine is a process that holds memory until memory becomes short.

ENGINE = """
import sys
from pathlib import Path
from llmrun.base.machine.memory_pressure import PressureWatch, linux_readers, volunteer_for_oom

volunteer_for_oom()
held = bytearray(int(sys.argv[2]))
held[::4096] = bytes(len(held[::4096])).replace(b"\\0", b"x")
print("ready", flush=True)
print(PressureWatch(linux_readers(Path(sys.argv[1]))).wait(60))
"""

FILLER = """
import mmap, sys, time

size, seconds = int(sys.argv[1]), float(sys.argv[2])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
started = time.monotonic()
for start in range(0, size, 1 << 20):
    time.sleep(max(0, started + seconds * start / size - time.monotonic()))
    for page in range(start, min(start + (1 << 20), size), 4096):
        memory[page] = 1
print("filled", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def engine(root: Path, n_bytes: int, group: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", ENGINE, str(root), str(n_bytes)]
    arguments = in_group(group, arguments) if group else arguments
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the files are those of Linux")


@needs_linux
@pytest.mark.night
def test_an_engine_is_gone_within_four_seconds(system: Path) -> None:
    with engine(system, 300 * MIB) as process:
        time.sleep(2.5)
        assert process.poll() is None
        put_free(system, 500_000)
        said, _ = process.communicate(timeout=4)
    assert (said, process.returncode) == ("512 MB of 16.0 GB memory left\n", 0)


@needs_linux
@needs_groups
@pytest.mark.night
@pytest.mark.parametrize(
    ("held", "seconds", "codes"),
    [
        (60, 0, {0}),  # both fit, so the engine leaves by itself
        (150, 0, {0, -9}),  # unless the engine checks at the right moment, the kernel kills the engine
        (300, 4, {0, -9}),  # unless this machine is busy, the engine leaves before memory runs out
    ],
)
def test_another_program_gets_ninety_percent(held: int, seconds: float, codes: set[int]) -> None:
    """Both programs are in a control group with little memory."""
    limit = 1200 * MIB
    limits = {"memory.limit_in_bytes": str(limit), "memory.memsw.limit_in_bytes": str(limit)}
    limits |= {"memory.max": str(limit), "memory.swap.max": "0"}
    with real_group("memory", limits) as group, engine(Path("/"), held * MIB, group) as process:
        fill = [sys.executable, "-c", FILLER, str(limit * 9 // 10), str(seconds)]
        with subprocess.Popen(in_group(group, fill), stdout=subprocess.PIPE, text=True) as filler:
            assert filler.stdout is not None
            said = filler.stdout.readline()
            gone = time.monotonic() + 4
            try:
                assert said == "filled\n"
                process.wait(timeout=gone - time.monotonic())
            finally:
                filler.kill()
    assert process.returncode in codes
