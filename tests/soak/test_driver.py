"""Tests of the driver of `scripts/soak`, with profiles that break their promises."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.driver import Broken, Case, Soak, main, run_profile
from tests.soak.profiles import PROFILES, Profile
from tests.support.cli.commands import ROOT

REAL = [*PROFILES]


def fake(soak: Soak) -> Iterator[Case]:
    """Break promises in the way that `model` names."""

    def case(number: int) -> str:
        if soak.model == "odd" and number % 2:
            raise Broken(f"{number} is odd, and {soak.random(number).random()}")
        if soak.model == "interrupted" and number == 2:
            raise KeyboardInterrupt
        if soak.model == "hanging":
            time.sleep(60)
        return "well"

    yield case
    if soak.model in ("end", "interrupted"):
        raise Broken("it was too much")


@pytest.fixture(autouse=True)
def fake_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the folders of broken cases are kept
    monkeypatch.setitem(PROFILES, "fake", Profile(f"{__name__}:fake", ""))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or importlib.import_module(__name__))


def test_broken_promises_name_the_case_to_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--model", "odd", "--count", "5", "--seed", "7"]) == 1
    shown = capsys.readouterr().out
    assert "fake, case 3: Broken: 3 is odd" in shown
    assert "to repeat: scripts/soak fake --model odd --seed 7 --first 3 --count 1" in shown
    assert "fake: FAILED, 5 cases of seed 7 in 0 s: 3 well" in shown


def test_a_case_depends_only_on_seed_and_number() -> None:
    both = run_profile("fake", model="odd", seed=7, count=4).broken
    assert run_profile("fake", model="odd", seed=7, first=3, count=1).broken == both[1:]
    assert run_profile("fake", model="odd", seed=8, first=3, count=1).broken != both[1:]


def test_a_profile_ends_when_its_time_is_over() -> None:
    result = run_profile("fake", model="end", seconds=0.2)
    assert result.seconds < 5
    assert result.cases > 1
    assert result.broken == ["before or after the cases: Broken: it was too much"]


def test_a_case_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.driver.CASE_S", 0.1)
    assert run_profile("fake", model="hanging", count=1).broken == ["case 0: Broken: still running after 0 s"]


def test_ctrl_c_ends_with_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--model", "interrupted"]) == 130
    assert capsys.readouterr().out == "fake: interrupted, 2 cases of seed 1 in 0 s: 2 well\n"


def test_the_list_names_every_profile() -> None:
    command = [sys.executable, "scripts/soak", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == REAL


@pytest.mark.parametrize("name", REAL)
def test_every_profile_is_where_the_table_says(name: str) -> None:
    module, _, function = PROFILES[name].code.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
