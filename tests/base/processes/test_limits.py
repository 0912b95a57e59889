"""Tests of the life of isolated processes. templates/test_process.py tests their limits."""

from __future__ import annotations

import gc
import sys

import psutil
import pytest

from llmrun.base.processes.limits import IsolatedProcess


def started() -> IsolatedProcess:
    made = IsolatedProcess("engine.constraint.validation_worker", "a test")
    made.start()
    return made


def test_close_ends_the_process_and_start_begins_another() -> None:
    before = psutil.Process().children()
    process = started()
    process.close()
    process.close()
    assert psutil.Process().children() == before
    process.start()
    assert len(psutil.Process().children()) == len(before) + 1
    process.close()
    assert psutil.Process().children() == before


@pytest.mark.push
def test_a_process_that_nobody_closed_ends_with_its_object() -> None:
    """Otherwise, its pipes and its memory would be lost."""
    if sys.platform == "win32":
        pytest.skip("needs file descriptors")
    gc.collect()  # of other tests' files
    me = psutil.Process()
    before, files = me.children(), me.num_fds()
    process = started()
    assert len(me.children()) == len(before) + 1
    del process
    gc.collect()
    assert me.children() == before
    assert me.num_fds() == files
