"""Tests of windowed layers on the CPU engine: the cache releases only unneeded blocks, and `kept` is correct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import cache_size, paged_kv
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.cache_size import MAX_ROWS, footprint_on_cpu
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.backends.fitting import Resources, fit_of
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import BLOCK
from tests.backends.cpu.test_backend import after_some_steps
from tests.support.backends.seam_contract import SeamContract, batch_of, rows
from tests.support.backends.windowed_plans import nothing_given_back, windows_in_plans
from tests.support.engine.drafts import PROPOSALS
from tests.support.engine.machine import run_engine_machine
from tests.support.gguf.gguf_files import tiny_llama

WINDOWS = (0, 20, 50)
CONTEXT = 2048
LENGTH = 1500


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("windows") / "tiny.gguf", layers=5, context=CONTEXT)


def opened(path: Path, *, windows: tuple[int, ...] = WINDOWS, context_size: int = CONTEXT, n: int = 2) -> CpuBackend:
    with windows_in_plans(*windows), open_gguf(path) as file:
        return CpuBackend(file, OpenOptions(context_size=context_size, max_sequences=n, threads=2))


@pytest.fixture(scope="module")
def whole(path: Path) -> Iterator[CpuBackend]:
    """Yield the same model with a cache that releases no blocks."""
    with nothing_given_back():
        backend = opened(path)
    yield backend
    backend.close()


@pytest.fixture
def backend(path: Path) -> Iterator[CpuBackend]:
    backend = opened(path)
    yield backend
    backend.close()


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()  # type: ignore[no-any-return]


def expected_after(whole: CpuBackend, history: list[int], tokens: list[int]) -> np.ndarray:
    whole.kv.free(0)
    return whole.forward(batch_of(rows(0, 0, history + tokens))).logits[len(history) :]


@pytest.mark.push
class TestSeamOfWindows(SeamContract):
    path: Path

    @pytest.fixture(autouse=True)
    def _model(self, path: Path) -> None:
        self.path = path

    def open_backend(self, *, context_size: int, max_sequences: int) -> CpuBackend:
        return opened(self.path, context_size=context_size, n=max_sequences)


@pytest.mark.push
def test_windows_that_were_given_back_are_not_missed(backend: CpuBackend, whole: CpuBackend) -> None:
    """The bits are equal for a long prompt in one batch, for chunks of any size, and for one token at a time."""
    tokens = some_tokens(LENGTH)
    expected = expected_after(whole, [], tokens)
    np.testing.assert_array_equal(backend.forward(batch_of(rows(0, 0, tokens))).logits, expected)
    at = 0
    for chunk in [*([1] * 40), 300, 33, 31, 256, 257, *([1] * 70), 400, 7, 32]:
        found = backend.forward(batch_of(rows(1, at, tokens[at : at + chunk]))).logits
        np.testing.assert_array_equal(found, expected[at : at + chunk])
        at += chunk
    assert at > 1400
    held = sum(pool.n_blocks - len(pool._free) for pool in backend.kv._pools[1:])
    assert held <= sum(2 * paged_kv.blocks_of_window(window, MAX_ROWS) for window in WINDOWS[1:]) < 2 * LENGTH // BLOCK


@pytest.mark.push
@pytest.mark.parametrize("back", [1, 33, MAX_ROWS + 256])
def test_some_tokens_can_be_taken_back(backend: CpuBackend, whole: CpuBackend, back: int) -> None:
    tokens, other = some_tokens(LENGTH), some_tokens(20, seed=2)
    backend.forward(batch_of(rows(0, 0, tokens)))
    n = LENGTH - back
    assert backend.kv.copy(0, 1, n) == n
    assert backend.kv.truncate(0, n) == n
    expected = expected_after(whole, tokens[:n], other)
    together = backend.forward(batch_of(rows(0, n, other) + rows(1, n, other))).logits
    np.testing.assert_array_equal(together, np.concatenate([expected, expected]))


@pytest.mark.push
def test_what_is_further_back_is_lost_and_run_again(backend: CpuBackend, whole: CpuBackend) -> None:
    tokens, other = some_tokens(LENGTH), some_tokens(20, seed=2)
    backend.forward(batch_of(rows(0, 0, tokens)))
    assert backend.kv.copy(0, 1, 500) == 0
    assert backend.kv.truncate(0, 500) == 0
    assert backend.kv.lengths == [0, 0]
    found = backend.forward(batch_of(rows(0, 0, tokens[:500] + other))).logits[500:]
    np.testing.assert_array_equal(found, expected_after(whole, tokens[:500], other))


@pytest.mark.push
@pytest.mark.parametrize(("steps", "kept"), [(1, 300), (5, 0)])
def test_a_stopped_batch_leaves_what_it_was_or_says_that_nothing_is_left(
    backend: CpuBackend, whole: CpuBackend, steps: int, kept: int
) -> None:
    """Cancelling in the first step loses nothing. In a later step, the window before the old length is lost."""
    tokens = some_tokens(300 + 1700)
    backend.forward(batch_of(rows(0, 0, tokens[:300])))
    backend.forward(batch_of(rows(1, 0, tokens[:300])))
    stopper = after_some_steps(backend, steps, backend.cancel)
    with pytest.raises(Cancelled):
        backend.forward(batch_of(rows(0, 300, tokens[300:])))
    stopper.join()
    assert backend.kv.lengths in ([kept, 300], [0, 300])  # empty if cancelled late
    start = backend.kv.truncate(0, 300)
    assert start == backend.kv.lengths[0]
    expected = expected_after(whole, [], tokens[:320])
    np.testing.assert_array_equal(backend.forward(batch_of(rows(0, start, tokens[start:320]))).logits, expected[start:])
    np.testing.assert_array_equal(backend.forward(batch_of(rows(1, 300, tokens[300:320]))).logits, expected[300:])


@pytest.mark.push
def test_a_model_of_windows_alone_goes_on_to_the_end_of_its_context(path: Path) -> None:
    backend = opened(path, windows=(20,), n=3)
    try:
        assert backend.kv.capacity >= 3 * CONTEXT
        tokens = some_tokens(CONTEXT)
        ends = [backend.forward(batch_of(rows(seq, 0, tokens))).logits[-1] for seq in range(3)]
        np.testing.assert_array_equal(ends[1:], ends[:1] * 2)
    finally:
        backend.close()


@pytest.mark.push
def test_the_sum_is_the_one_that_the_engine_opens_it_by(path: Path) -> None:
    """A window's share of the cache does not grow with the context."""
    backend = opened(path, n=1)
    with windows_in_plans(*WINDOWS), open_gguf(path) as file:
        found = fit_of(file, Resources(1 << 40, threads=2), context=CONTEXT)
        twice = footprint_on_cpu(
            file, backend.plan, max_sequences=2, context_size=CONTEXT, kv_type="q8_0", max_rows=MAX_ROWS, n_threads=2
        ).cache
    backend.close()
    cache, layer = found.footprint.cache, 2 * 2 * (16 + 2)  # KV heads, keys and values, features and their scale
    assert cache.of(CONTEXT) == backend.info.kv_bytes
    assert cache.token == 2 * layer  # two of five layers have no window
    assert cache.of(CONTEXT) - cache.of(CONTEXT // 2) == CONTEXT // 2 * cache.token
    assert twice.of(CONTEXT) == 2 * cache.of(CONTEXT)


@pytest.mark.night
def test_the_engine_keeps_its_promises_where_windows_move_all_the_time(path: Path) -> None:
    """One pass of the engine takes several team steps, and only whole blocks are kept beyond the windows."""
    lost: list[bool] = []

    def kept(self: PagedKV, seq: int, n: int) -> int:
        found = known(self, seq, n)
        lost.append(found < min(n, self.lengths[seq]))
        return found

    known = PagedKV._kept
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cache_size, "MAX_ROWS", 4))
        stack.enter_context(mock.patch.object(paged_kv, "_CUT_BACK", 0))
        stack.enter_context(mock.patch.object(PagedKV, "_kept", kept))
        backends = [opened(path, windows=(0, 4, 20), context_size=160, n=n) for n in (3, 1)]
        for one in backends:
            stack.callback(one.close)
        run_engine_machine(backends[0], alone=backends[1], examples=40, propose=PROPOSALS["mixed"])
    assert any(lost)
