"""Tests of returning the memory of free blocks: the system gets whole pages, and answers stay the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.engine.engine import Engine
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.arena import allocate
from llmrun.formats.layouts.kv import BLOCK
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.backends.windowed_plans import windows_in_plans
from tests.support.gguf.gguf_files import tiny_llama

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes back parts of an allocation")


@needs_linux
@pytest.mark.parametrize("block_bytes", [100, 4096, 5000, 3 << 14])
def test_only_free_blocks_are_returned(block_bytes: int) -> None:
    memory = allocate(2 * 16 * block_bytes, "a test").reshape(2, 16, block_bytes)
    kv = PagedKV({0: [memory]}, max_sequences=3, context_size=8 * BLOCK)
    for seq in range(3):
        kv.extend({seq: 4 * BLOCK})
    memory[:] = 255
    kv.free(1)
    kv.return_free_memory()
    held = {int(block) for seq in (0, 2) for block in kv.tables[0, seq, :4]}
    assert (memory[:, sorted(held)] == 255).all()
    is_zero = (memory == 0).all(axis=2)
    if block_bytes == 3 << 14:
        assert set(np.flatnonzero(is_zero.all(axis=0)).tolist()) == set(range(16)) - held
    kv.extend({1: 4 * BLOCK})
    kv.return_free_memory()
    assert (memory[:, sorted(held)] == 255).all()


@contextmanager
def opened(path: Path, kv_type: str) -> Iterator[CpuBackend]:
    with windows_in_plans(0, 50), open_gguf(path) as file:
        options = OpenOptions(context_size=1024, max_sequences=3, threads=2, kv_type=kv_type)
        backend = CpuBackend(file, options)
    try:
        yield backend
    finally:
        backend.close()


def tokens_of(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, count)]


def logits_of(backend: CpuBackend, seq: int, start: int, tokens: list[int]) -> NDArray[np.float32]:
    return backend.forward(batch_of(rows(seq, start, tokens))).logits


@pytest.mark.push
@pytest.mark.parametrize("filling", ["returned", "NaN"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_the_contents_of_free_blocks_never_matter(tmp_path: Path, kv_type: str, filling: str) -> None:
    """Half of the layers have a sliding window. All bits set are NaN in float16."""

    def discard(kv: PagedKV) -> None:
        if filling == "returned":
            kv.return_free_memory()
        for pool in kv._pools if filling == "NaN" else ():
            for memory in pool._memory:
                memory[:, pool._free] = 255

    path = tiny_llama(tmp_path / "tiny.gguf", layers=4, context=1024)
    texts = [tokens_of(count, seed) for seed, count in enumerate((700, 333, 70))]
    with opened(path, kv_type) as fresh:
        expected = [logits_of(fresh, seq, 0, tokens) for seq, tokens in enumerate(texts)]
    with opened(path, kv_type) as backend:
        kv = backend.kv
        discard(kv)
        for seq in range(3):
            logits_of(backend, seq, 0, tokens_of(900, 10 + seq))
            kv.free(seq)
        discard(kv)
        np.testing.assert_array_equal(logits_of(backend, 0, 0, texts[0]), expected[0])
        discard(kv)
        np.testing.assert_array_equal(logits_of(backend, 1, 0, texts[1][:111]), expected[1][:111])
        assert kv.truncate(0, 650) == 650
        discard(kv)
        np.testing.assert_array_equal(logits_of(backend, 0, 650, texts[0][650:]), expected[0][650:])
        discard(kv)
        for at in range(111, 333, 3):  # in steps of few rows
            np.testing.assert_array_equal(logits_of(backend, 1, at, texts[1][at : at + 3]), expected[1][at : at + 3])
            discard(kv)
        assert kv.copy(2, 0, 0) == 0
        np.testing.assert_array_equal(logits_of(backend, 2, 0, texts[2]), expected[2])


@needs_linux
@pytest.mark.push
def test_the_engine_returns_memory_of_free_blocks(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", layers=4, context=1024)
    with opened(path, "f16") as backend:
        engine = Engine(backend)
        backend.forward(batch_of(rows(0, 0, tokens_of(900, 1))))
        memory = backend.kv._pools[0]._memory[0]
        written = np.count_nonzero(memory)
        engine.release_idle_memory()
        assert np.count_nonzero(memory) == written
        backend.kv.free(0)
        engine.release_idle_memory()
        assert np.count_nonzero(memory) < written / 10
