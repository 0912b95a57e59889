"""Tests that an instruction level is used when it works, not when the processor claims to support it."""

from __future__ import annotations

import errno
import platform
import signal
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import numpy as np
import pytest

from llmrun.base.compiled import levels
from llmrun.base.compiled.levels import LEVELS, PORTABLE, Target, host_levels, host_target
from llmrun.base.errors import KernelWarning, UsageError
from llmrun.base.processes import commands
from llmrun.kernels import level_probe
from llmrun.kernels.code import simd
from tests.support.kernels.runs import LEVELS_HERE, target_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return tmp_path / "levels"


def arguments_of(target: Target) -> tuple[str, str, str, str]:
    return target.level.name, target.triple, target.cpu, target.features


def works(target: Target) -> bool:
    return levels.level_works(*arguments_of(target))


def dying(code: str) -> mock._patch[mock.Mock]:
    """Replace trials by the given Python program."""
    return mock.patch.object(commands, "command", return_value=[sys.executable, "-c", code])


@pytest.mark.push
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_level_of_this_processor_works(cache: Path, level: str) -> None:
    assert works(target_of(level))


@pytest.mark.push
def test_what_worked_is_not_tried_again(cache: Path) -> None:
    assert works(target_of(LEVELS_HERE[0]))
    assert len(list(cache.iterdir())) == 1
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("tried again")):
        assert works(target_of(LEVELS_HERE[0]))


@pytest.mark.push
def test_a_damaged_memory_of_a_trial_is_no_memory(cache: Path) -> None:
    assert works(target_of(LEVELS_HERE[0]))
    next(cache.iterdir()).write_bytes(b"work")
    with dying("raise SystemExit(1)"):
        assert not works(target_of(LEVELS_HERE[0]))


@pytest.mark.push
def test_a_cache_that_cannot_be_written_costs_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "file"))
    assert works(target_of(LEVELS_HERE[0]))


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_an_instruction_that_is_refused_ends_the_trial_alone(cache: Path) -> None:
    with dying(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"):
        assert not works(target_of(LEVELS_HERE[0]))
    assert not cache.exists()


def test_a_probe_that_does_not_end_proves_nothing(cache: Path) -> None:
    """The processor may just be busy, so it is not blamed."""
    with (
        dying("import time; time.sleep(60)"),
        mock.patch.object(levels, "_TIMEOUT_SECONDS", 0.2),
        pytest.warns(KernelWarning, match="instructions cannot be tested: no result after 0.2 s: "),
    ):
        assert host_target.__wrapped__().level is PORTABLE


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


def test_a_level_that_computes_something_else_does_not_work() -> None:
    target = target_of(LEVELS_HERE[0])
    right = level_probe.results(target)
    for line in range(len(right)):
        wrong = right.copy()
        wrong[line, 3] ^= 1
        with mock.patch.object(level_probe, "results", return_value=wrong):
            assert level_probe.main(*arguments_of(target)) == 1
    assert level_probe.main(*arguments_of(target)) == 0


def rounded_twice(builder: Any, level: str, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b), c)


def without_conversion(builder: Any, level: str, halves: Any) -> Any:
    return builder.sitofp(builder.bitcast(halves, simd.I16X16), simd.F32X16)


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("emit_fma", rounded_twice), ("emit_f16_to_f32", without_conversion)],
)
def test_machine_code_with_wrong_results_fails_the_probe(level: str, name: str, wrong: Any) -> None:
    with mock.patch.object(simd, name, wrong):
        assert level_probe.main(*arguments_of(target_of(level))) == 1


def test_the_twin_of_multiply_add_is_exact() -> None:
    """It uses float64, whose result could be rounded twice for other inputs."""
    floats = level_probe._inputs()[3].view(np.float32)
    for value, found in zip(floats, level_probe.twin()[6].view(np.float32), strict=True):
        exact = Fraction(float(value)) ** 2 + Fraction(float(value))
        neighbours = [np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf)]
        assert abs(Fraction(float(found)) - exact) < min(abs(Fraction(float(other)) - exact) for other in neighbours)


def test_a_trial_says_something_about_every_part() -> None:
    """A result of all zeros would match any other such result."""
    assert np.count_nonzero(level_probe.results(target_of("portable")), axis=1).min() > 8


def test_the_next_level_takes_the_place_of_one_that_does_not_work() -> None:
    best, *others = host_levels()
    expected = others[0] if others else PORTABLE
    with (
        mock.patch.object(levels, "level_works", side_effect=lambda level, *_: level != best.name),
        pytest.warns(KernelWarning, match=f"reports instructions that do not work: {best.name} ") as told,
    ):
        target = host_target.__wrapped__()
    assert target.level is expected
    assert len(told) == 1


def test_the_portable_level_needs_no_trial() -> None:
    with mock.patch.object(levels, "level_works", return_value=False), warnings.catch_warnings():
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
    present = llvm.get_host_cpu_features()
    present.update({name: False for name in present if name.startswith("avx512")} | dict.fromkeys(level.features, True))
    with mock.patch.object(llvm, "get_host_cpu_features", return_value=present):
        reported = host_levels()
        with pytest.warns(KernelWarning, match=f"reports instructions that do not work: {level.name} ") as told:
            target = host_target.__wrapped__()
    assert (reported[0], target.level) == (level, reported[1])
    assert len(told) == 1


def test_a_forced_level_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    best = host_levels()[0]
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", best.name)
    with (
        mock.patch.object(levels, "level_works", return_value=best is PORTABLE),
        pytest.raises(UsageError, match=f"LLMRUN_CPU_LEVEL: '{best.name}' cannot be used: this processor reports"),
    ):
        host_target.__wrapped__()
