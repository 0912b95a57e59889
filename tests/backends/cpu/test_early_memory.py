"""Tests of memory that a start takes for the weights before the engine is imported."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import backend, early_memory
from llmrun.backends.cpu.early_memory import EarlyMemory
from llmrun.backends.cpu.kind import KIND
from llmrun.backends.cpu.weights import reserve
from llmrun.base.errors import DoesNotFit
from llmrun.base.machine.own_process import huge_and_anonymous_bytes
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.kernels.runs import random_matrix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can take memory early")

PAGE = 2 << 20


def taken(n_bytes: int) -> EarlyMemory:
    """Return memory whose thread has taken all that it wants."""
    memory = EarlyMemory(n_bytes)
    memory._thread.join()
    assert memory.touched
    return memory


def test_taken_pages_are_the_memory_of_the_weights() -> None:
    memory, matrix = taken(40 * PAGE), random_matrix("q8_0", 64, 256)
    packed = reserve([matrix], memory)[matrix.name]
    assert memory.stop() >= 38 * PAGE
    assert packed.data.base is not None
    assert not packed.data.any()
    packed.data[:] = 1
    assert memory._region[0] == 1


def test_pages_that_no_weight_needs_are_returned() -> None:
    before = huge_and_anonymous_bytes()
    memory = taken(40 * PAGE)
    array = memory.array(3 * PAGE + 1)
    after = huge_and_anonymous_bytes()
    assert array is not None
    assert before is not None
    assert after is not None
    assert after[1] - before[1] < 10 * PAGE


def test_memory_that_is_too_small_is_not_used() -> None:
    assert taken(4 * PAGE).array(6 * PAGE) is None


def test_only_weights_that_surely_fit_get_memory_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf")) as file:
        assert early_memory.early_memory(file.tensors) is None
        monkeypatch.setattr(early_memory, "_LEAST", 1)
        memory = early_memory.early_memory(file.tensors)
        assert memory is not None
        memory.stop()
        size = sum(tensor.nbytes for tensor in file.tensors.values())
        monkeypatch.setattr(early_memory, "free_memory", lambda reserved: size)
        assert early_memory.early_memory(file.tensors) is None
        monkeypatch.setattr(early_memory, "free_memory", lambda reserved: 1 << 40)
        monkeypatch.setattr(early_memory, "address_space_limit", lambda: 1 << 40)
        assert early_memory.early_memory(file.tensors) is None


@pytest.mark.push
def test_early_memory_counts_as_free_and_its_thread_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, contexts would become smaller by chance."""
    seen: list[int] = []

    def refuse(file: Any, plan: Any, head: Any, options: OpenOptions, *rest: Any) -> None:
        seen.append(options.reserved_memory)
        raise DoesNotFit("no")

    memory = taken(4 * PAGE)
    monkeypatch.setattr(early_memory, "early_memory", lambda tensors, reserved: memory)
    monkeypatch.setattr(backend, "cache_size", refuse)
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf")) as file, pytest.raises(DoesNotFit):
        KIND.open(file, OpenOptions(reserved_memory=100))
    assert seen == [100 - memory.touched]
    assert not [thread for thread in threading.enumerate() if thread.name == "llmrun-memory"]
