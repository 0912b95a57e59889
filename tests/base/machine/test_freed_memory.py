"""Tests of returning freed memory to the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from llmrun.base.machine.memory import return_freed_memory

blocks = [bytes(1000) for _ in range(100_000)]
kept = blocks[::1000]  # so that no large part of the heap is free
del blocks
before = psutil.Process().memory_info().rss
return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""

LARGE_BLOCKS = """
import psutil
from llmrun.base.machine.memory import return_large_blocks_at_once

return_large_blocks_at_once()
larger = [b"y" * (8 << 20)]
larger.clear()  # glibc would now keep blocks of up to 8 MiB in its heap
blocks = [(b"x" * (2 << 20), bytes(5000)) for _ in range(40)]
kept = [small for _, small in blocks]
before = psutil.Process().memory_info().rss
del blocks
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.push
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_freed_memory_is_returned() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    assert int(found.stdout) > 50_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_large_blocks_are_returned_at_once() -> None:
    found = subprocess.run([sys.executable, "-c", LARGE_BLOCKS], capture_output=True, check=True, text=True)
    assert int(found.stdout) > 70_000_000
