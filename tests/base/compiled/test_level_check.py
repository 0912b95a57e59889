"""Tests that an instruction level is used when it works, not when the processor claims to support it."""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.compiled import host, level_check
from llmrun.base.compiled.host import host_features, host_levels, host_target, level_works
from llmrun.base.compiled.kernel import TRIAL
from llmrun.base.compiled.levels import LEVELS, PORTABLE, target_of
from llmrun.base.compiled.loading import load_for
from llmrun.base.errors import KernelWarning, UsageError
from llmrun.base.processes import commands
from llmrun.kernels import level_probe
from tests.support.kernels.runs import LEVEL_NAMES, LEVELS_HERE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return tmp_path / "levels"


BEST = host_levels()[0]


def dying(code: str) -> mock._patch[mock.Mock]:
    """Replace the check by a Python program. The kernels of the check are loaded first, so that none is compiled."""
    level_check.results(BEST)
    level_check.results(PORTABLE)
    return mock.patch.object(commands, "command", return_value=[sys.executable, "-c", code])


@pytest.mark.push
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_level_of_this_processor_works(cache: Path, level: str) -> None:
    assert level_works(LEVEL_NAMES[level])


@pytest.mark.push
def test_what_worked_is_not_tried_again(cache: Path) -> None:
    assert level_works(BEST)
    assert len(list(cache.iterdir())) == 1
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("tried again")):
        assert level_works(BEST)


@pytest.mark.push
def test_a_damaged_memory_of_a_trial_is_no_memory(cache: Path) -> None:
    assert level_works(BEST)
    next(cache.iterdir()).write_bytes(b"work")
    with dying("raise SystemExit(1)"):
        assert not level_works(BEST)


@pytest.mark.push
def test_a_cache_that_cannot_be_written_costs_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "file"))
    assert level_works(BEST)


@pytest.mark.push
@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_an_instruction_that_is_refused_ends_the_trial_alone(cache: Path) -> None:
    with dying(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"):
        assert not level_works(BEST)
    assert not cache.exists()


@pytest.mark.push
def test_a_probe_that_does_not_end_proves_nothing(cache: Path) -> None:
    """The processor may just be busy, so it is not blamed."""
    with (
        dying("import time; time.sleep(60)"),
        mock.patch.object(host, "_TIMEOUT_SECONDS", 0.2),
        pytest.warns(KernelWarning, match="instructions cannot be tested: no result after 0.2 s: "),
    ):
        assert host_target.__wrapped__().level is PORTABLE


@pytest.mark.push
def test_without_child_processes_only_portable_code_is_used(cache: Path) -> None:
    """The other levels cannot be tested, so they are not used."""
    no_process = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    with (
        mock.patch.object(subprocess, "run", side_effect=no_process),
        pytest.warns(KernelWarning, match="instructions cannot be tested: Resource temporarily unavailable: ") as told,
    ):
        assert host_target.__wrapped__().level is PORTABLE
    assert len(told) == 1
    assert not cache.exists()


@pytest.mark.push
def test_a_level_that_computes_something_else_does_not_work() -> None:
    right = level_check.results(BEST)
    for line in range(0, len(right), 64):
        wrong = bytearray(right)
        wrong[line + 3] ^= 1
        with mock.patch.object(level_check, "results", side_effect=[bytes(wrong), right]):
            assert level_check.main(BEST.name) == 1
    assert level_check.main(BEST.name) == 0


def twin() -> NDArray[np.uint8]:
    """Return the results that the building blocks must compute, computed with NumPy."""
    lines = np.frombuffer(level_check.inputs(), np.uint8).reshape(-1, 64)
    small, any_bytes, floats = lines[0], lines[1], lines[3].view(np.float32)
    halves = lines[2, :32].view(np.float16)
    activation = any_bytes[:4].view(np.int8).astype(np.int32)
    eights = np.concatenate([any_bytes.reshape(16, 4), small.reshape(16, 4)], 1).view(np.int8).astype(np.int32)
    wide = halves.astype(np.float32)
    larger = np.where(wide > floats, wide, floats)
    # In float64, the square is exact, and so is the sum for these inputs. The result is
    # therefore rounded only once, as in a fused multiply-add.
    fused = (floats.astype(np.float64) ** 2 + floats).astype(np.float32)
    found = [
        small.reshape(16, 4).astype(np.int32) @ activation,
        any_bytes.view(np.int8).reshape(16, 4).astype(np.int32) @ activation,
        np.array(level_probe.ENTRIES, np.int8)[small],
        any_bytes >> 3 & 15,
        wide,
        halves.view(np.uint16).astype(np.int32),
        fused,
        floats.astype(np.int32),
        np.ascontiguousarray(np.concatenate([wide, larger])[1::2]),
        *(eights @ any_bytes[first : first + 8].view(np.int8).astype(np.int32) for first in level_probe.PAIR),
    ]
    return np.stack([line.view(np.uint8) for line in found])


@pytest.mark.push
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_the_building_blocks_compute_what_numpy_computes(level: str) -> None:
    found = np.frombuffer(level_check.results(LEVEL_NAMES[level]), np.uint8).reshape(-1, 64)
    np.testing.assert_array_equal(found, twin())


def test_a_multiply_add_that_rounds_twice_would_be_detected() -> None:
    floats = np.frombuffer(level_check.inputs(), np.uint8).reshape(-1, 64)[3].view(np.float32)
    assert np.any((floats * floats + floats).view(np.int32) != twin()[6].view(np.int32))


@pytest.mark.push
def test_the_kernel_writes_as_many_results_as_are_read() -> None:
    """The number is in level_check.py, because that module must not import Numba."""
    kernel = load_for(target_of(PORTABLE), [TRIAL])[TRIAL]
    given = ctypes.create_string_buffer(level_check.inputs())
    found = ctypes.create_string_buffer(b"\xaa" * 64 * 20)
    kernel(ctypes.addressof(given), ctypes.addressof(found))
    expected = level_check.results(PORTABLE)
    assert found.raw[: len(expected)] == expected
    assert set(found.raw[len(expected) : -1]) == {0xAA}


def test_the_twin_of_multiply_add_is_exact() -> None:
    """It uses float64, whose result could be rounded twice for other inputs."""
    floats = np.frombuffer(level_check.inputs(), np.uint8).reshape(-1, 64)[3].view(np.float32)
    for value, found in zip(floats, twin()[6].view(np.float32), strict=True):
        exact = Fraction(float(value)) ** 2 + Fraction(float(value))
        neighbours = [np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf)]
        assert abs(Fraction(float(found)) - exact) < min(abs(Fraction(float(other)) - exact) for other in neighbours)


def test_a_trial_says_something_about_every_part() -> None:
    """A result of all zeros would match any other such result."""
    assert np.count_nonzero(twin(), axis=1).min() > 8


def test_the_next_level_takes_the_place_of_one_that_does_not_work() -> None:
    best, *others = host_levels()
    expected = others[0] if others else PORTABLE
    with (
        mock.patch.object(host, "level_works", side_effect=lambda level: level is not best),
        pytest.warns(KernelWarning, match=f"reports instructions that do not work: {best.name} ") as told,
    ):
        target = host_target.__wrapped__()
    assert target.level is expected
    assert len(told) == 1


def test_the_portable_level_needs_no_trial() -> None:
    with mock.patch.object(host, "level_works", return_value=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        assert host_target.__wrapped__().level is PORTABLE


# Levels for processors of this architecture whose instructions this one lacks.
LACKING = [level for level in LEVELS if platform.machine() in level.machines and level not in host_levels()]


@pytest.mark.push
@pytest.mark.skipif(not LACKING, reason="this processor supports every level")
@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_instructions_that_are_reported_but_missing_are_not_used(cache: Path) -> None:
    """The processor really refuses the instructions, so the probe dies of SIGILL."""
    level = LACKING[0]
    other = {name for name in host_features() if not name.startswith("avx512")}
    with mock.patch.object(host, "host_features", return_value=frozenset({*other, *level.features})):
        reported = host_levels()
        with pytest.warns(KernelWarning, match=f"reports instructions that do not work: {level.name} ") as told:
            target = host_target.__wrapped__()
    assert (reported[0], target.level) == (level, reported[1])
    assert len(told) == 1


def test_a_forced_level_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    best = host_levels()[0]
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", best.name)
    with (
        mock.patch.object(host, "level_works", return_value=best is PORTABLE),
        pytest.raises(UsageError, match=f"LLMRUN_CPU_LEVEL: '{best.name}' cannot be used: this processor reports"),
    ):
        host_target.__wrapped__()
