"""Tests of a recurrent model behind the Backend contract: its state cannot be rewound, and `kept` reports that."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.recurrent import tiny_recurrent
from tests.support.backends.seam_contract import SeamContract, batch_of, rows
from tests.support.engine.contract import CancelContract, PrefixContract

PROMPT = np.random.default_rng(0).integers(5, 200, 40).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recurrent(tmp_path_factory.mktemp("recurrent") / "tiny.gguf")


def opened(path: Path, *, context_size: int = 128, max_sequences: int = 3) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(
            file, OpenOptions(context_size=context_size, max_sequences=max_sequences, threads=1, gpu_layers=0)
        )


@pytest.mark.push
class TestSeam(SeamContract):
    exact = False
    goes_back = False

    @pytest.fixture(autouse=True)
    def _model(self, path: Path) -> None:
        self.path = path

    def open_backend(self, *, context_size: int, max_sequences: int) -> LlamaBackend:
        return opened(self.path, context_size=context_size, max_sequences=max_sequences)


@pytest.mark.push
class TestEngine(PrefixContract, CancelContract):
    exact = False
    tolerance = 0.02
    trials = 5
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, path: Path) -> None:
        cls.path = path

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> LlamaBackend:
        return opened(cls.path, context_size=context_size, max_sequences=max_sequences)

    def assert_kept(self, cached: int, n: int, *, of: int) -> None:
        assert cached == (n if n == of else 0)


@pytest.mark.push
@pytest.mark.parametrize(("n", "kept"), [(40, 40), (39, 0), (1, 0), (0, 0)])
def test_a_state_is_kept_whole_or_not_at_all(path: Path, n: int, kept: int) -> None:
    backend = opened(path)
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    assert backend.kv.copy(0, 1, n) == kept
    assert backend.kv.truncate(0, n) == kept
    whole = backend.forward(batch_of(rows(2, 0, [*PROMPT, 7]))).logits[-1]
    for seq in (0, 1):  # both sequences can continue from their reported lengths
        continued = backend.forward(batch_of(rows(seq, kept, [*PROMPT, 7][kept:]))).logits[-1]
        np.testing.assert_allclose(continued, whole, rtol=0, atol=1e-3)
    backend.close()


@pytest.mark.push
def test_a_pass_stopped_half_way_says_what_is_left(path: Path) -> None:
    """Nothing is left if part of the pass went into the state. `truncate` reports it, and the sequence continues from
    there.
    """
    backend = opened(path, context_size=2048, max_sequences=1)
    long = np.random.default_rng(1).integers(5, 200, 1900).tolist()
    whole = backend.forward(batch_of(rows(0, 0, [*PROMPT, *long]))).logits[-1]
    seen: set[int] = set()
    trials = 0
    while 0 not in seen:
        trials += 1
        assert trials < 300
        backend.kv.free(0)
        backend.forward(batch_of(rows(0, 0, PROMPT)))
        timer = threading.Timer(0.002 * (trials % 40), backend.cancel)
        timer.start()
        try:
            backend.forward(batch_of(rows(0, len(PROMPT), long)))
        except Cancelled:
            kept = backend.kv.truncate(0, len(PROMPT))
            seen.add(kept)
            continued = backend.forward(batch_of(rows(0, kept, [*PROMPT, *long][kept:]))).logits[-1]
            np.testing.assert_allclose(continued, whole, rtol=0, atol=1e-3)
        timer.join()
        backend._process.clear_stop()
    assert seen <= {0, len(PROMPT)}
    backend.close()
