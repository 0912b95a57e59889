"""Compiles the kernels of an emulated machine outside the emulator, which takes a tenth of the time.

It also gives the check of the instruction-set level more time. For tests that run on an emulated machine, this is a
pytest plugin, too.
"""

from __future__ import annotations

import os

import pytest

from llmrun.base.compiled import host
from llmrun.base.processes import commands
from tests.support.arm.machines import HOST_PYTHON, ROOT

# Numba must not optimize for the emulated processor, and modules must not come from the emulated machine's folders.
_PROGRAM = """
import os, sys
os.environ.update(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
sys.path.insert(0, sys.argv[1])
from llmrun.kernels.compiler import serve
serve()
"""


def compile_outside() -> None:
    command = commands.command

    def outside(module: str, *arguments: str) -> list[str]:
        if module == "kernels.compiler":
            return [os.environ[HOST_PYTHON], "-I", "-c", _PROGRAM, str(ROOT)]
        return command(module, *arguments)

    commands.command = outside
    host._TIMEOUT_SECONDS = 600.0


def pytest_configure(config: pytest.Config) -> None:
    del config
    compile_outside()
