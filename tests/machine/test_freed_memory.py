"""Tests of returning freed memory to the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from llmrun.machine.freed_memory import return_freed_memory

blocks = [bytes(1000) for _ in range(100_000)]
kept = blocks[::1000]  # so that no large part of the heap is free
del blocks
before = psutil.Process().memory_info().rss
return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_freed_memory_is_returned() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    assert int(found.stdout) > 50_000_000
