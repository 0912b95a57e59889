"""Tests of recurrent models behind the Backend contract: states cannot be rewound, except to the end of an image."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.base.errors import Cancelled
from llmrun.base.types import Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.layout import Rows
from tests.support.backends.recurrent import tiny_recurrent
from tests.support.backends.seam_contract import SeamContract, batch_of, rows
from tests.support.engine.contract import CancelContract, PrefixContract
from tests.support.vision.opened import open_vision, vision_of
from tests.support.vision.prompts import Image, part_of, prompt_batch

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


BEFORE, QUESTION = PROMPT[:9], PROMPT[9:20]


@pytest.fixture(scope="module", params=["qwen3vl_merger qwen35", "lfm2"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    """Both kinds of recurrent models that read images: with M-RoPE, where an image has one position, and without."""
    backend = open_vision(tmp_path_factory.mktemp("seeing"), request.param, max_sequences=3)
    yield backend
    backend.close()


def image_of(backend: LlamaBackend, seed: int = 0) -> Image:
    """Return an image whose rows are random."""
    projector = vision_of(backend).projector
    piece = next(piece for piece in projector.layout(220, 120).pieces if isinstance(piece, Rows))
    rows = np.random.default_rng(seed).standard_normal((piece.count, projector.row_width)).astype(np.float32)
    return Image(piece, rows)


def asked(backend: LlamaBackend, *parts: list[int] | Image, seq: int = 0) -> Batch:
    return prompt_batch(vision_of(backend).projector, parts, seq=seq)


def fresh_logits(backend: LlamaBackend, batch: Batch) -> NDArray[np.float32]:
    backend.kv.free(2)
    return backend.forward(replace(batch, seq=np.full_like(batch.seq, 2))).logits


def assert_continues(backend: LlamaBackend, batch: Batch, kept: int) -> None:
    """Assert that the first `kept` rows of a prompt are in the cache of its sequence, as if they had just been run."""
    expected = fresh_logits(backend, batch)
    found = backend.forward(part_of(batch, kept)).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * float(np.ptp(expected)))


@pytest.mark.push
@pytest.mark.parametrize("rows", [1000, 20, 7])
def test_another_question_reuses_the_image(seeing: LlamaBackend, rows: int) -> None:
    """llama.cpp#26994: prefix with image never cached for hybrid models. Prompts run in steps of any size."""
    image = image_of(seeing)
    end = len(BEFORE) + image.piece.count
    batch = asked(seeing, BEFORE, image, QUESTION)
    seeing.kv.free(0)
    for start, stop in pairwise([*range(0, len(batch.tokens), rows), len(batch.tokens)]):
        seeing.forward(part_of(batch, start, stop, wanted=1))
    for question in (QUESTION[::-1], QUESTION * 3, [7]):
        assert seeing.kv.truncate(0, end + 3) == end
        assert_continues(seeing, asked(seeing, BEFORE, image, question), end)


@pytest.mark.push
def test_two_requests_share_an_image(seeing: LlamaBackend) -> None:
    image = image_of(seeing)
    end = len(BEFORE) + image.piece.count
    seeing.kv.free(0)
    seeing.forward(asked(seeing, BEFORE, image, QUESTION))
    assert seeing.kv.copy(0, 1, end + 5) == end
    assert_continues(seeing, asked(seeing, BEFORE, image, QUESTION[5:], seq=1), end)
    assert_continues(seeing, asked(seeing, BEFORE, image, [*QUESTION, 7]), end + len(QUESTION))
    assert seeing.kv.copy(1, 0, end) == end  # the copy owns the checkpoint, too
    assert_continues(seeing, asked(seeing, BEFORE, image, QUESTION[::-1]), end)


@pytest.mark.push
def test_each_image_of_a_chat_can_be_returned_to(seeing: LlamaBackend) -> None:
    first, second = image_of(seeing), image_of(seeing, 1)
    count = first.piece.count
    words = PROMPT * 12  # checkpoints after images are kept if they are 512 tokens apart
    one, two = len(BEFORE) + count, len(BEFORE) + 2 * count + len(words)
    parts = [BEFORE, first, words, second]
    batch = asked(seeing, *parts, QUESTION)
    seeing.kv.free(0)
    seeing.forward(batch)
    assert seeing.kv.truncate(0, two + 3) == two
    assert_continues(seeing, asked(seeing, *parts, QUESTION[::-1]), two)
    assert seeing.kv.truncate(0, two - 1) == one  # inside the second image
    assert_continues(seeing, batch, one)
    assert seeing.kv.truncate(0, one - 1) == 0


@pytest.mark.push
def test_stops_in_the_text_keep_the_image(seeing: LlamaBackend) -> None:
    image = image_of(seeing)
    end = len(BEFORE) + image.piece.count
    batch = asked(seeing, BEFORE, image, QUESTION)
    seeing.kv.free(0)
    seeing.forward(part_of(batch, 0, end, wanted=0))
    seeing.cancel()
    with pytest.raises(Cancelled):
        seeing.forward(part_of(batch, end))
    assert seeing.kv.truncate(0, end) == end
    assert_continues(seeing, batch, end)
