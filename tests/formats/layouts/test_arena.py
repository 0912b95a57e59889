"""Tests of anonymous memory: zeroed, page-aligned, and refused with our own error."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from llmrun.base.errors import DoesNotFit
from llmrun.formats.layouts.arena import address_of, allocate, round_up


@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, (2 << 20) + 1, 5 << 20])
def test_memory_is_zero_writable_and_begins_on_a_page(n_bytes: int) -> None:
    memory = allocate(n_bytes, "a test")
    assert memory.shape == (n_bytes,)
    assert not memory.any()
    assert address_of(memory) % mmap.PAGESIZE == 0
    memory[:] = 255
    assert (memory == 255).all()


@pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 70])
def test_memory_that_is_not_there_does_not_fit(n_bytes: int) -> None:
    with pytest.raises(DoesNotFit, match=f"out of memory: KV cache: {n_bytes >> 20:,} MiB needed") as error:
        allocate(n_bytes, "KV cache")
    assert error.value.exit_code == 7
    assert error.value.hint


def test_a_view_keeps_the_memory_alive() -> None:
    view = allocate(1 << 16, "a test").view(np.int32)[5:10]
    view[:] = 7
    assert view.tolist() == [7] * 5


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_rounding_up(value: int, multiple: int, expected: int) -> None:
    assert round_up(value, multiple) == expected


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_large_memory_is_private_for_linux_gives_shared_memory_no_huge_pages() -> None:
    memory = allocate(8 << 20, "a test")
    address = address_of(memory)
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [([int(end, 16) for end in fields[0].split("-")], fields[1]) for fields in mappings]
    assert [flags for (first, last), flags in bounds if first <= address < last] == ["rw-p"]


def test_a_forked_child_cannot_write_into_its_parents_memory() -> None:
    if sys.platform == "win32":
        pytest.skip("needs fork")
    memory = allocate(1 << 16, "a test")
    child = os.fork()
    if child == 0:
        memory[:] = 255
        os._exit(0)
    os.waitpid(child, 0)
    assert not memory.any()
