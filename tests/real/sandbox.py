"""Runs untrusted programs, such as a model's code and its tests, in child processes with limits and without network."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.real.confined import FINISHED, NO_NAMESPACE

_CONFINED = Path(__file__).with_name("confined.py")
_CPU_S = 5  # limits the CPU time, so that verdicts do not depend on how busy the machine is
_WALL_S = 60.0  # for programs that sleep
_SHOWN = 2000  # characters of the end of stderr
_AT_A_TIME = 2


@dataclass(frozen=True)
class Verdict:
    """Whether a program ran to its end. If not, `words` contains the end of its stderr or another reason."""

    passed: bool
    words: str = ""


def run_untrusted(program: str) -> Verdict:
    """Run a program in an empty folder, and remove the folder."""
    with tempfile.TemporaryDirectory(prefix="llmrun-untrusted-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CONFINED), str(_CPU_S)],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = child.communicate(program, timeout=_WALL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return Verdict(False, f"it did not end within {_WALL_S:g} s")
    if NO_NAMESPACE in err:
        warnings.warn(NO_NAMESPACE, stacklevel=2)
    if child.returncode == 0 and out.endswith(FINISHED + "\n"):
        return Verdict(True)
    return Verdict(False, err[-_SHOWN:].strip() or f"exit status {child.returncode}")


def run_all_untrusted(programs: Sequence[str]) -> list[Verdict]:
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(run_untrusted, programs))
