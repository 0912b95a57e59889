"""Tests that an instruction level is used when it works, not when the processor claims to support it."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmrun import child_processes
from llmrun.compiled import level_check, levels
from llmrun.compiled.levels import PORTABLE, Target, host_levels, host_target
from llmrun.errors import KernelWarning
from llmrun.kernels import level_probe
from tests.support.kernels.runs import LEVELS_HERE, target_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return tmp_path / "levels"


def works(target: Target) -> bool:
    return level_check.works(target.level.name, target.triple, target.cpu, target.features)


def dying(code: str) -> mock._patch[mock.Mock]:
    """Replace trials by the given Python program."""
    return mock.patch.object(child_processes, "command", return_value=[sys.executable, "-c", code])


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_level_of_this_processor_works(cache: Path, level: str) -> None:
    assert works(target_of(level))


def test_what_worked_is_not_tried_again(cache: Path) -> None:
    assert works(target_of(LEVELS_HERE[0]))
    assert len(list(cache.iterdir())) == 1
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("tried again")):
        assert works(target_of(LEVELS_HERE[0]))


def test_a_damaged_memory_of_a_trial_is_no_memory(cache: Path) -> None:
    assert works(target_of(LEVELS_HERE[0]))
    next(cache.iterdir()).write_bytes(b"work")
    with dying("raise SystemExit(1)"):
        assert not works(target_of(LEVELS_HERE[0]))


def test_a_cache_that_cannot_be_written_costs_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "file"))
    assert works(target_of(LEVELS_HERE[0]))


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_an_instruction_that_is_refused_ends_the_trial_alone(cache: Path) -> None:
    with dying(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"):
        assert not works(target_of(LEVELS_HERE[0]))
    assert not cache.exists()


def test_a_trial_that_does_not_end_has_failed(cache: Path) -> None:
    with dying("import time; time.sleep(60)"), mock.patch.object(level_check, "_TIMEOUT_SECONDS", 0.2):
        assert not works(target_of(LEVELS_HERE[0]))


def test_where_no_process_can_be_started_the_processor_is_trusted(cache: Path) -> None:
    with mock.patch.object(subprocess, "run", side_effect=OSError("no processes")):
        assert works(target_of(LEVELS_HERE[0]))
    assert not cache.exists()


def test_a_level_that_computes_something_else_does_not_work() -> None:
    target = target_of(LEVELS_HERE[0])
    arguments = (target.level.name, target.triple, target.cpu, target.features)
    right = level_probe.results(target)
    for line in range(len(right)):
        wrong = right.copy()
        wrong[line, 3] ^= 1
        with mock.patch.object(level_probe, "results", side_effect=[wrong, right]):
            assert level_probe.main(*arguments) == 1
    assert level_probe.main(*arguments) == 0


def test_a_trial_says_something_about_every_part() -> None:
    """A result of all zeros would match any other such result."""
    assert np.count_nonzero(level_probe.results(target_of("portable")), axis=1).min() > 8


def test_the_next_level_takes_the_place_of_one_that_does_not_work() -> None:
    best, *others = host_levels()
    expected = others[0] if others else PORTABLE
    with (
        mock.patch.object(levels, "works", side_effect=lambda level, *_: level != best.name),
        pytest.warns(KernelWarning, match=f"reports instructions that fail on it: {best.name} ") as told,
    ):
        target = host_target.__wrapped__()
    assert target.level is expected
    assert len(told) == 1


def test_the_portable_level_needs_no_trial() -> None:
    with mock.patch.object(levels, "works", return_value=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        assert host_target.__wrapped__().level is PORTABLE
