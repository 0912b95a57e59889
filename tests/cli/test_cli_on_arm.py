"""Tests of llmrun as a program on emulated Arm machines, with a real model. `scripts/test_arm` runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.arm.machines import PROCESSORS, run_on
from tests.support.cli.commands import llmrun
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.arm

# The prompt has enough tokens for matrix products of panels.
_GENERATE = ("generate", "-q", "--seed", "11", "-n", "24", "Tell me a story about a small robot that finds a garden.")


@pytest.mark.parametrize(
    ("machine", "program"), [("neoverse-v2", "llmrun"), ("cortex-a72", "tests.support.arm.program")]
)
def test_an_answer_is_the_same_on_arm(tmp_path: Path, machine: str, program: str) -> None:
    """The Neoverse-V2 compiles its own kernels, whose machine code differs from that of the compiler outside."""
    arguments = (*_GENERATE, "-m", str(smollm2()))
    folders = {"LLMRUN_CACHE_DIR": str(tmp_path)} if program == "llmrun" else {}
    done = run_on(machine, "-m", program, *arguments, LLMRUN_CPU_LEVEL=PROCESSORS[machine].level, **folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.encode() == llmrun(*arguments).stdout != b""


@pytest.mark.parametrize(
    ("machine", "cpu"),
    [("neoverse-v2", "Neoverse-V2"), ("cortex-a76", "Cortex-A76"), ("cortex-a72", "Cortex-A72")],
)
def test_the_doctor_knows_arm_processors(machine: str, cpu: str) -> None:
    """The level is not forced, so the probe runs on the emulated processor."""
    done = run_on(machine, "-m", "tests.support.arm.program", "doctor", "--offline", "--json")
    report = json.loads(done.stdout)
    found = {one["name"]: one for one in report["checks"] if one["section"] == "Processor"}
    assert found["cpu"]["facts"]["cpu"].endswith(f" x {cpu}")
    assert found["cpu"]["facts"]["cpu_architecture"] == "aarch64"
    assert found["kernels_level"]["facts"]["level"] == PROCESSORS[machine].level
    assert found["kernels_level"]["facts"]["refused"] == []
