"""Runs the kernels' tests on an emulated Arm machine with the best instruction-set level. `scripts/test_arm` runs this.

That machine supports every level for Arm, so the tests that take a level run at each.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.arm.machines import run_on

pytestmark = pytest.mark.arm

_HERE = Path(__file__).parent
_FILES = sorted(str(path.relative_to(_HERE)) for path in _HERE.glob("*/test_*.py"))


@pytest.mark.parametrize("file", _FILES)
def test_the_kernels_tests_pass_on_arm(file: str) -> None:
    """Each file has a process of its own, because QEMU's memory grows with the machine code that has run."""
    plugin = ("-p", "tests.support.arm.host_compiler", "-p", "no:cacheprovider")
    done = run_on("neoverse-v2", "-m", "pytest", "-q", *plugin, str(_HERE / file))
    assert done.returncode == 0, done.stdout
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed in .*", summary), summary
