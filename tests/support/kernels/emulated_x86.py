"""Runs Python on older x86 processors, which QEMU emulates. `scripts/test_x86` makes the interpreters."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.levels import LEVELS, Target
from tests.support.kernels.objects import object_images

ROOT = Path(__file__).resolve().parents[3]

_PRINT_TARGET = """
import json
from llmrun.base.compiled.host import host_target
target = host_target()
print(json.dumps([target.level.name, target.triple, target.cpu, target.features]))
"""


def emulator(processor: str) -> str:
    """Return the path of the Python that runs on this emulated processor."""
    return str(ROOT / ".venv-x86" / processor / "bin" / "python")


def run_on(
    processor: str, *arguments: str, text: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python. The emulator's own warnings are removed from stderr."""
    done = subprocess.run(
        [emulator(processor), *arguments],
        input=text or "",
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    done.stderr = "".join(
        line for line in done.stderr.splitlines(keepends=True) if "TCG doesn't support requested feature" not in line
    )
    return done


def target_on(processor: str) -> Target:
    """Return the target that llmrun chooses on an emulated processor, after its probe has run there."""
    done = run_on(processor, "-W", "error", "-c", _PRINT_TARGET)
    assert done.returncode == 0, done.stderr
    level_name, *rest = json.loads(done.stdout)
    return Target(next(level for level in LEVELS if level.name == level_name), *rest)


def compile_for(target: Target, names: Iterable[KernelName]) -> None:
    """Compile kernels into the cache for the emulated processor. In the emulator, this would take 20 times as long."""
    object_images(list(names), target)
