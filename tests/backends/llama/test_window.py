"""Tests of a sliding window behind the Backend contract: tokens outside every window are dropped, as `kept` reports."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.placement import cache_by_context
from llmrun.base.errors import Cancelled, KVFull
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import Comparison, SeamContract, batch_of, rows
from tests.support.backends.sliding_window import WINDOW, tiny_sliding_window

LENGTH = 1500  # the window's own cache is 768 tokens here


OPTIONS = OpenOptions(context_size=2048, max_sequences=2, threads=1, gpu_layers=0)


def opened(path: Path, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options))


@pytest.fixture(scope="module")
def window_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sliding_window(tmp_path_factory.mktemp("memory") / "window.gguf")


@pytest.mark.push
class TestSlidingWindow(SeamContract):
    exact = False

    @pytest.fixture(autouse=True)
    def _model(self, window_path: Path) -> None:
        self.path = window_path

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return opened(self.path, context_size=context_size, max_sequences=max_sequences)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, count).tolist()  # type: ignore[no-any-return]


def fill(backend: LlamaBackend, tokens: list[int], *, seq: int = 0, chunk: int = 100) -> None:
    for at in range(0, len(tokens), chunk):
        backend.forward(batch_of(rows(seq, at, tokens[at : at + chunk])))


def assert_goes_on(backend: LlamaBackend, history: list[int], seq: int) -> None:
    """Assert that the sequence continues from its length with the logits of a fresh run of the same tokens."""
    other = some_tokens(20, seed=9)
    start = backend.kv.lengths[seq]
    actual = backend.forward(batch_of(rows(seq, start, history[start:] + other))).logits[-20:]
    backend.kv.free(seq)
    fill(backend, history, seq=seq)
    expected = backend.forward(batch_of(rows(seq, len(history), other))).logits
    comparison = Comparison()
    comparison.exact = False
    comparison.assert_same(actual, expected)


@pytest.mark.push
@pytest.mark.parametrize(("context_size", "max_sequences"), [(2048, 1), (2048, 2), (256, 1), (1024, 16)])
def test_the_cache_takes_what_was_forecast(window_path: Path, context_size: int, max_sequences: int) -> None:
    """llama.cpp logs how many cells it allocates for how many layers, and the forecast must give the same sum."""
    backend = opened(window_path, context_size=context_size, max_sequences=max_sequences)
    backend.close()
    made = re.findall(r"llama_kv_cache: size = .*\( *(\d+) cells, +(\d+) layers", "\n".join(backend.log))
    assert len(made) == 2
    of_a_cell = 2 * 2 * 16 * 2  # heads, keys and values, features, bytes
    assert backend.info.kv_bytes == sum(int(cells) * int(layers) * of_a_cell for cells, layers in made)
    with open_gguf(window_path) as file:
        forecast = cache_by_context(file, max_sequences=max_sequences).of(context_size)
    assert forecast == pytest.approx(backend.info.kv_bytes, rel=0.01)


@pytest.mark.night
def test_a_copy_reaches_back_as_far_as_a_whole_window_is_left(window_path: Path) -> None:
    backend = opened(window_path)
    tokens = some_tokens(LENGTH)
    fill(backend, tokens)
    kept = {}
    for n in range(LENGTH, 0, -1):
        kept[n] = backend.kv.copy(0, 1, n)
        assert kept[n] in (n, 0)
        backend.kv.free(1)
    first = min(n for n in kept if kept[n])
    assert LENGTH - 768 <= first < LENGTH - WINDOW
    assert all(kept[n] == n for n in range(first, LENGTH + 1))
    assert backend.kv.lengths == [LENGTH, 0]
    assert backend.kv.copy(0, 1, first) == first
    assert_goes_on(backend, tokens[:first], 1)
    assert backend.kv.truncate(0, first - 1) == 0
    assert backend.kv.lengths[0] == 0
    assert_goes_on(backend, tokens[: first - 1], 0)
    backend.close()


@pytest.mark.push
def test_nothing_is_dropped_before_the_cache_of_the_window_is_full(window_path: Path) -> None:
    backend = opened(window_path)
    tokens = some_tokens(500)
    fill(backend, tokens)
    for n in (499, 300, WINDOW + 1, WINDOW, WINDOW - 1, 1):
        assert backend.kv.copy(0, 1, n) == n
    assert backend.kv.truncate(0, 10) == 10
    assert_goes_on(backend, tokens[:10], 0)
    backend.close()


@pytest.mark.push
def test_a_stopped_pass_takes_nothing_from_a_full_window(window_path: Path) -> None:
    """It overwrote tokens that earlier tokens saw, but none that the next token sees."""
    backend = opened(window_path)
    tokens = some_tokens(LENGTH)
    fill(backend, tokens)
    stopped = 0
    for moment in range(8):
        timer = threading.Timer(0.002 * moment, backend.cancel)
        timer.start()
        try:
            backend.forward(batch_of(rows(0, LENGTH, some_tokens(500, seed=2))))
        except Cancelled:
            stopped += 1
            assert backend.kv.lengths[0] == LENGTH
            timer.join()
            continue
        timer.join()
        backend._process.clear_stop()
        backend.kv.free(0)
        fill(backend, tokens)
    assert stopped
    assert_goes_on(backend, tokens, 0)
    backend.close()


@pytest.mark.push
def test_a_full_cache_takes_nothing_from_a_window(window_path: Path) -> None:
    backend = opened(window_path, context_size=1792, kv_tokens=1792)
    tokens = some_tokens(LENGTH)
    fill(backend, tokens)
    with pytest.raises(KVFull):
        backend.forward(batch_of(rows(1, 0, some_tokens(400, seed=2))))
    assert backend.kv.lengths == [LENGTH, 0]
    assert_goes_on(backend, tokens[:LENGTH], 0)
    backend.close()


@pytest.mark.push
def test_a_long_prompt_takes_from_the_others_only_what_they_see_no_more(window_path: Path) -> None:
    """The window's cache holds only sixteen windows and 512 rows."""
    backend = opened(window_path, max_sequences=16, context_size=1024)
    tokens = some_tokens(100)
    for seq in range(16):
        fill(backend, tokens, seq=seq)
    backend.forward(batch_of(rows(0, 100, some_tokens(512, seed=2))))
    for seq in range(1, 16):
        assert backend.kv.truncate(seq, 100) == 100
    assert_goes_on(backend, tokens, 15)
    backend.close()
