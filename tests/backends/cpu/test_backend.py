"""Tests that the CPU engine keeps the Backend contract, refuses bad batches and survives cancellation."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import backend as cpu_backend
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.cache_size import MAX_ROWS
from llmrun.backends.registry import open_backend
from llmrun.base.compiled import compiling, loading
from llmrun.base.errors import Cancelled, KVFull, UnsupportedModel
from llmrun.base.types import Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts import records
from tests.support.backends.seam_contract import SeamContract, batch_of, rows
from tests.support.gguf.gguf_files import Tensor, tiny_llama, tiny_vocabulary
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import changed_copy

VOCABULARY = len(tiny_vocabulary().tokens)


def open_cpu(path: Path, *, context_size: int = 128, max_sequences: int = 1, threads: int = 2) -> CpuBackend:
    with open_gguf(path) as file:
        return CpuBackend(file, OpenOptions(context_size=context_size, max_sequences=max_sequences, threads=threads))


@pytest.mark.push
class TestSeamOfATinyModel(SeamContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_llama(tmp_path_factory.mktemp("seam") / "tiny.gguf", weight_type="Q4_0")

    path: Path

    def open_backend(self, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(self.path, context_size=context_size, max_sequences=max_sequences)


@pytest.mark.push
class TestSeamOfTheRealModel(SeamContract):
    def open_backend(self, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(smollm2(), context_size=context_size, max_sequences=max_sequences)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("cpu") / "tiny.gguf", context=2048)


@pytest.fixture
def backend(path: Path) -> Iterator[CpuBackend]:
    backend = open_cpu(path, context_size=1024, max_sequences=3)
    yield backend
    backend.close()


# --- basics ----------------------------------------------------------------------------------------------------------


@pytest.mark.push
def test_info_describes_the_model_and_the_session(backend: CpuBackend, path: Path) -> None:
    info = backend.info
    assert (info.backend, info.architecture, info.name, info.file_type) == ("cpu", "llama", "tiny llama", "Q8_0")
    assert (info.context_size, info.train_context, info.max_sequences, info.threads) == (1024, 2048, 3, 2)
    assert info.path == str(path)
    assert info.file_bytes == path.stat().st_size
    assert info.device.startswith("2 threads, ")
    assert info.metadata["llama.block_count"] == 2
    assert info.parameters == VOCABULARY * 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 64


@pytest.mark.push
def test_one_thread_is_one_thread(path: Path) -> None:
    backend = open_cpu(path, threads=1)
    backend.close()
    assert backend.info.device.startswith("1 thread, ")


@pytest.mark.push
def test_capacity_holds_every_sequence_at_its_full_length(path: Path) -> None:
    backend = open_cpu(path, context_size=40, max_sequences=2)
    try:
        both = rows(0, 0, [7] * 40) + rows(1, 0, [7] * 40)
        assert backend.kv.capacity >= 80
        assert len(backend.forward(batch_of(both)).logits) == 80
    finally:
        backend.close()


@pytest.mark.push
def test_a_batch_may_be_longer_than_a_step(backend: CpuBackend) -> None:
    tokens = [int(token) for token in np.random.default_rng(0).integers(3, 250, 2 * MAX_ROWS + 77)]
    whole = backend.forward(batch_of(rows(0, 0, tokens))).logits
    one_by_one = [
        backend.forward(batch_of(rows(1, at, tokens[at : at + 100]))).logits for at in range(0, len(tokens), 100)
    ]
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)


@pytest.mark.push
def test_nothing_wanted_gives_no_rows(backend: CpuBackend) -> None:
    batch = batch_of(rows(0, 0, [5, 6, 7]))
    none = backend.forward(Batch(batch.tokens, batch.seq, batch.pos, np.zeros(3, np.uint8))).logits
    assert none.shape == (0, backend.info.vocabulary_size)
    after = backend.forward(batch_of(rows(0, 3, [8]))).logits
    np.testing.assert_array_equal(after[0], backend.forward(batch_of(rows(1, 0, [5, 6, 7, 8]))).logits[3])


# --- invalid batches -------------------------------------------------------------------------------------------------


@pytest.mark.push
@pytest.mark.parametrize(
    ("triples", "complaint"),
    [
        ([], "at least one row"),
        ([(-1, 0, 0)], f"token ids must be 0 to {VOCABULARY - 1}"),
        ([(VOCABULARY, 0, 0)], f"token ids must be 0 to {VOCABULARY - 1}"),
        ([(5, -1, 0)], "sequences must be 0 to 2"),
        ([(5, 3, 0)], "sequences must be 0 to 2"),
        ([(5, 0, 1)], "sequence 0 continues at position 0, not 1"),
        ([(5, 0, -1)], "sequence 0 continues at position 0, not -1"),
        ([(5, 0, 0), (5, 0, 0)], "sequence 0 continues at position 1, not 0"),
        ([(5, 0, 0), (5, 1, 0), (5, 0, 2)], "sequence 0 continues at position 1, not 2"),
        (rows(0, 0, [5] * 1025), "1025 tokens does not fit in a context of 1024"),
    ],
)
def test_a_broken_batch_never_reaches_a_kernel(
    backend: CpuBackend, triples: list[tuple[int, int, int]], complaint: str
) -> None:
    """Kernels index memory with these numbers."""
    with pytest.raises(ValueError, match=complaint):
        backend.forward(batch_of(triples))
    assert backend.kv.lengths == [0, 0, 0]


@pytest.mark.push
def test_a_full_cache_changes_nothing(backend: CpuBackend) -> None:
    """The engine's own batches cannot fill the cache, which has room for everything, so this test makes the cache
    smaller.
    """
    first = backend.forward(batch_of(rows(0, 0, [5] * 40))).logits
    backend.kv.truncate(0, 20)
    with mock.patch.object(backend.kv._pools[0], "_free", []), pytest.raises(KVFull):
        backend.forward(batch_of(rows(1, 0, [5])))
    assert backend.kv.lengths == [20, 0, 0]
    np.testing.assert_array_equal(backend.forward(batch_of(rows(0, 20, [5] * 20))).logits, first[20:])


# --- cancelling ------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """The exception that the test's signal handler raises."""


def stop_by_cancel(backend: CpuBackend) -> None:
    backend.cancel()


def stop_by_signal(backend: CpuBackend) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.push
@pytest.mark.parametrize(("stop", "error"), [(stop_by_cancel, Cancelled), (stop_by_signal, Interrupt)])
def test_a_stopped_prefill_leaves_no_trace(
    path: Path, stop: Callable[[CpuBackend], None], error: type[BaseException]
) -> None:
    """The prefill shares a prefix with another sequence. It is cancelled between steps and then repeated."""
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")

    def raise_interrupt(number: int, frame: object) -> None:
        raise Interrupt

    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 250, 1500)]
    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    backend = open_cpu(path, context_size=2048, max_sequences=2)
    try:
        backend.forward(batch_of(rows(0, 0, prompt[:50])))
        expected = backend.forward(batch_of(rows(0, 50, prompt[50:]))).logits
        backend.kv.truncate(0, 50)
        backend.kv.copy(0, 1, 50)
        stopper = after_some_steps(backend, 2, lambda: stop(backend))
        with pytest.raises(error):
            backend.forward(batch_of(rows(0, 50, prompt[50:])))
        stopper.join()
        assert backend.kv.lengths == [50, 50]
        for seq in (0, 1):
            np.testing.assert_array_equal(backend.forward(batch_of(rows(seq, 50, prompt[50:]))).logits, expected)
    finally:
        backend.close()
        signal.signal(signal.SIGUSR1, before)


def after_some_steps(backend: CpuBackend, steps: int, act: Callable[[], None]) -> threading.Thread:
    """Call `act` from another thread once the team has begun the given number of further steps."""
    sync = backend._team._sync
    start = int(sync[sync_word("SYNC_STEP")])

    def watch() -> None:
        deadline = time.monotonic() + 60
        while sync[sync_word("SYNC_STEP")] < start + steps:
            assert time.monotonic() < deadline, "the steps never came"
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def sync_word(name: str) -> int:
    return int(getattr(records, name)) // records.WORD


# --- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.push
def test_progress_ends_with_all_weights_loaded(path: Path) -> None:
    reports: list[tuple[str, float]] = []
    with open_gguf(path) as file:
        CpuBackend(file, OpenOptions(context_size=32, progress=lambda *report: reports.append(report))).close()
    loading = [share for what, share in reports if what == "loading weights"]
    assert loading == sorted(loading)
    assert loading[-1] == 1.0


@pytest.mark.push
def test_a_first_run_tells_that_kernels_are_compiled(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = compiling.compile_and_link
    monkeypatch.setattr(loading, "_loaded", {})

    def slow(names: object, target: object, progress: Callable[[int, int], None]) -> object:
        progress(1, 2)
        progress(2, 2)
        return link(names, target, None)  # type: ignore[arg-type]

    reports: list[tuple[str, float]] = []
    monkeypatch.setattr(compiling, "compile_and_link", slow)
    with open_gguf(path) as file:
        CpuBackend(file, OpenOptions(context_size=32, progress=lambda *report: reports.append(report))).close()
    assert reports[:2] == [
        ("compiling kernels 1/2, only once, about 5 s left", 0.5),
        ("compiling kernels 2/2, only once", 1.0),
    ]


def test_the_time_left_is_known_before_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction starts with a typical time, and moves to the measured time."""
    clock, words = [0.0], list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cpu_backend, "most_threads", lambda: 2)
    compiled = cpu_backend._compile_progress(lambda what, share: words.append(what))
    assert compiled is not None
    for seconds, done in ((0, 0), (6, 1), (40, 20), (60, 39), (61, 40)):
        clock[0] = seconds
        compiled(done, 40)
    assert words == [
        "compiling kernels 0/40, only once, about 20 s left",
        "compiling kernels 1/40, only once, about 65 s left",
        "compiling kernels 20/40, only once, about 35 s left",
        "compiling kernels 39/40, only once, about 5 s left",
        "compiling kernels 40/40, only once",
    ]


@pytest.mark.push
def test_the_file_may_be_closed_and_deleted_once_the_model_is_open(tmp_path: Path) -> None:
    """The embedding is read from the mapping while the model is open."""
    path = tiny_llama(tmp_path / "tiny.gguf")
    backend = open_cpu(path)
    other = open_cpu(path)
    path.unlink()
    try:
        batch = batch_of(rows(0, 0, [5, 6, 7]))
        np.testing.assert_array_equal(backend.forward(batch).logits, other.forward(batch).logits)
    finally:
        backend.close()
        other.close()


def test_an_unsupported_weight_type_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    before = threading.active_count()
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", width=256, feed_forward=256)
    mixed = changed_copy(path, tmp_path / "mixed.gguf", make_one_matrix_q1_0)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight: the CPU engine has no kernels for Q1_0"):
        open_backend(mixed, OpenOptions(backend="cpu"))
    assert threading.active_count() == before


def make_one_matrix_q1_0(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    rows, columns = tensors["blk.0.attn_q.weight"][-1]
    tensors["blk.0.attn_q.weight"] = ("Q1_0", bytes(rows * columns // 128 * 18), (rows, columns))
