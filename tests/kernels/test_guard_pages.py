"""Tests that no kernel accesses memory outside its buffers: every buffer ends or starts at a page without access."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.cli.commands import ROOT
from tests.support.kernels.guard_pages import ENDS
from tests.support.kernels.runs import ALL_KERNELS, LEVELS_HERE

pytestmark = pytest.mark.push


def guarded_run(*arguments: str) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines: the kernels that ran, then checksums of all results."""
    command = [sys.executable, "-m", "tests.support.kernels.guard_pages", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.night
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_every_kernel_keeps_to_its_buffers(level: str) -> None:
    results = set()
    for end in ENDS:
        code, said = guarded_run(level, end)
        assert code == 0, f"exit code {code} with the page at the {end} of the buffers, in: {said[-1]}"
        results.add(said[-1])
    assert len(results) == 1
    families = {line.split(" ")[0].rpartition(".")[0] for line in said}
    # The team has threads and futexes instead of buffers, and the others write only a few words to fixed places.
    assert families >= {name.module for name in ALL_KERNELS} - {"team", "processor", "level_probe"}


@pytest.mark.parametrize("end", ENDS)
def test_a_kernel_that_leaves_its_buffer_is_named(end: str) -> None:
    """Each buffer is missing its last or its first element."""
    code, said = guarded_run(LEVELS_HERE[0], end, "64")
    assert code == -signal.SIGSEGV
    assert said == ["limits.read"]
