"""Tests of memory for one transfer: both ends see it, and it is freed when both have dropped it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.backends.llama.memory_transfers import MemoryReceiver, MemorySender
from llmrun.backends.llama.messages import SharedMemory
from llmrun.base.errors import LlmrunError


@pytest.fixture
def sender() -> Iterator[MemorySender]:
    sender = MemorySender()
    yield sender
    sender.close()
    sender.close()


@pytest.fixture
def receiver(sender: MemorySender) -> MemoryReceiver:
    return MemoryReceiver(str(os.dup(int(sender.handle))))


def test_both_ends_map_the_same_memory(sender: MemorySender, receiver: MemoryReceiver) -> None:
    for n_bytes in (1, 5000, 3_000_001):
        ours, name = sender.map(n_bytes)
        theirs = receiver.map(name, n_bytes)
        assert len(ours) == len(theirs) == n_bytes
        theirs[-1] = 77
        assert ours[-1] == 77
        ours[0] = 55
        assert theirs[0] == 55


def test_memory_whose_request_was_never_sent_is_skipped(sender: MemorySender, receiver: MemoryReceiver) -> None:
    for _ in range(3):
        sender.map(100)
    ours, name = sender.map(200)
    ours[:4] = b"last"
    assert receiver.map(name, 200)[:4] == b"last"


def test_dropped_memory_leaves_nothing_open(sender: MemorySender, receiver: MemoryReceiver) -> None:
    def open_files() -> list[str]:
        return [entry.name for entry in Path("/proc/self/fd").iterdir()]

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:llmrun")

    ours, name = sender.map(5000)
    receiver.map(name, 5000)
    view = memoryview(ours)
    del ours
    before = mapped()
    files = len(open_files())
    del view
    assert (len(open_files()), mapped()) == (files - 1, before - 1)


def test_the_next_request_reports_a_dead_child(sender: MemorySender) -> None:
    sender.child_started()  # closes the only other end
    sender.map(100)


def test_a_system_without_memory_says_how_much_was_wanted(
    sender: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SharedMemory, n_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(SharedMemory, "map", refuse)
    with pytest.raises(LlmrunError, match=r"cannot share 3,000 bytes of memory with llama\.cpp: Cannot allocate"):
        sender.map(3000)
