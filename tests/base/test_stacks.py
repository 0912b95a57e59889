"""Tests that a call gets the stack it asks for, and that other threads keep theirs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest

from llmrun.base.stacks import on_stack
from tests.support.cli.commands import ROOT


def stack_of_this_thread() -> int:
    """Return this thread's stack size in bytes, as the C library reports it (pthread_getattr_np, Linux only)."""
    libc = ctypes.CDLL(None)
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    libc.pthread_attr_destroy(attributes)
    return size.value


def test_what_a_call_returns_or_raises_comes_back() -> None:
    assert on_stack(1 << 20, lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        on_stack(1 << 20, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        on_stack(1 << 20, sys.exit)


def test_the_stack_is_as_large_as_was_asked_for_and_those_of_later_threads_are_as_before() -> None:
    before = threading.stack_size()
    assert on_stack(100_000_001, stack_of_this_thread) >= 100_000_001
    assert threading.stack_size() == before


def test_where_there_is_no_room_for_it_the_stack_is_smaller() -> None:
    code = (
        "import resource\nfrom llmrun.base.stacks import on_stack\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "print(on_stack(1 << 40, lambda: 'done'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    assert (ran.stdout, ran.stderr) == (b"done\n", b"")
