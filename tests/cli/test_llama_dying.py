"""Tests of `llmrun generate` when llama.cpp's process is killed, or the user interrupts it."""

from __future__ import annotations

import signal
import sys

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.llama.probe import gpus
from tests.support.cli.dying_llama import assert_ends_in_one_line

pytestmark = pytest.mark.push


@pytest.fixture(autouse=True, scope="module")
def _gpus_are_known() -> None:
    """Probe the GPUs first; otherwise the first run would start a process for it."""
    gpus()


@pytest.mark.cover(1)
@pytest.mark.parametrize("doing", ["loading", "running"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_in_one_line_and_leaves_no_process(number: signal.Signals, doing: str) -> None:
    assert_ends_in_one_line(number, doing, "0")
