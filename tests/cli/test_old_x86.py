"""Tests of llmrun on older x86 processors, which QEMU emulates. `scripts/test_x86` runs them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.commands import ROOT, llmrun
from tests.support.kernels.emulated_x86 import compile_for, emulator, run_on, target_on
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.x86

QUESTION = ("generate", "--temp", "0", "-n", "8", "Say hello in French.")

_RUN_AND_LIST_KERNELS = """
import pickle, sys
from llmrun.cli.app import main
from llmrun.base.compiled import loading
assert main(sys.argv[2:]) == 0
open(sys.argv[1], "wb").write(pickle.dumps([name for name, _ in loading._loaded]))
"""

_REPORTS_MORE = """
import llvmlite.binding as llvm
real = llvm.get_host_cpu_features

def features():
    found = real()
    found.update(dict.fromkeys((name for name in found if name.startswith("avx512")), True))
    return found

llvm.get_host_cpu_features = features
"""


@pytest.mark.parametrize(("processor", "level"), [("Haswell", "avx2"), ("Nehalem", "portable")])
def test_old_processors_give_the_same_answer(tmp_path: Path, processor: str, level: str) -> None:
    question = [*QUESTION, "-m", str(smollm2())]
    used = tmp_path / "used"
    here = subprocess.run(
        [sys.executable, "-c", _RUN_AND_LIST_KERNELS, str(used), *question, "-q"],
        capture_output=True,
        cwd=ROOT,
        check=True,
    )
    compile_for(target_on(processor), pickle.loads(used.read_bytes()))
    there = run_on(processor, "-m", "llmrun", *question, "-v")
    assert there.returncode == 0, there.stderr
    assert f"2 threads, {level}" in there.stderr or f"1 thread, {level}" in there.stderr
    assert there.stdout.encode() == here.stdout != b""


def test_falsely_reported_instructions_are_not_used(tmp_path: Path) -> None:
    """AVX-512 is reported, but the emulated processor lacks it."""
    (tmp_path / "sitecustomize.py").write_text(_REPORTS_MORE)
    code = "from llmrun.base.compiled.levels import host_levels, host_target; "
    code += "print(host_levels()[0].name, host_target().level.name)"
    done = run_on("Haswell", "-c", code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", LLMRUN_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["avx512vnni", "avx2"], done.stderr
    notes = [line for line in done.stderr.splitlines() if "KernelWarning" in line]
    assert len(notes) == 1
    assert "reports instructions that do not work: avx512vnni kernels are not used" in notes[0]


def test_a_processor_that_cannot_run_numpy_gets_a_message(tmp_path: Path) -> None:
    """The emulated processor is QEMU's kvm64. The emulator shows this machine's /proc/cpuinfo, so it is replaced."""
    assert llmrun("--version").returncode == 0
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu sse2 cx16 hypervisor\n")
    script = f"mount --bind '{tmp_path}/cpuinfo' /proc/cpuinfo; exec \"$@\""
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", emulator("kvm64")]
    crash = subprocess.run([emulator("kvm64"), "-c", "import numpy"], capture_output=True, check=False)
    done = subprocess.run([*command, "-m", "llmrun", "doctor"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert crash.returncode != 0
    assert done.returncode == 1
    assert "error: this processor cannot run NumPy: it lacks lahf_lm, popcnt, sse4_1, sse4_2, ssse3" in done.stderr
