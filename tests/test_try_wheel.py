"""Tests of scripts/try_wheel.py, which the workflow wheels.yml runs on each system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.try_wheel import ANSWER, QUESTION, find_wheel
from tests.support.models.downloads import smollm2

LINUX = "llmrun_gguf-0.2.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
WINDOWS = "llmrun_gguf-0.2.0-py3-none-win_amd64.whl"
PURE = "llmrun_gguf-0.2.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("tag", "wheel"),
    [("manylinux_2_17_x86_64", LINUX), ("manylinux2014_x86_64", LINUX), ("win_amd64", WINDOWS), ("any", PURE)],
)
def test_a_tag_selects_one_wheel(tag: str, wheel: str, tmp_path: Path) -> None:
    for name in (LINUX, WINDOWS, PURE, "llmrun_gguf-0.2.0.tar.gz"):
        (tmp_path / name).touch()
    assert find_wheel(tag, tmp_path).name == wheel


@pytest.mark.parametrize("wheels", [[], [PURE, PURE.replace("0.2.0", "0.3.0")]])
def test_missing_and_several_wheels_are_errors(wheels: list[str], tmp_path: Path) -> None:
    for name in wheels:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match=f"{len(wheels)} wheels in .* have the tag any"):
        find_wheel("any", tmp_path)


@pytest.mark.push
def test_the_expected_answer_is_right() -> None:
    command = ["-m", "llmrun", "generate", "--quiet", "--backend", "cpu", "--temp", "0", "--max-tokens", "32"]
    answer = subprocess.check_output([sys.executable, *command, "--model", str(smollm2()), QUESTION], text=True)
    assert answer.splitlines() == ANSWER.splitlines()
