"""Tests that logits are bit-identical across threads, chunks, shared prefixes, batch composition and cache types.

test_numerics.py compares instruction-set levels.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.types import LOGITS, Batch
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import TINY_MODELS, tiny_model

pytestmark = pytest.mark.push

THREADS = (1, 2, 3, 4)
CHUNKS = (1, 7, 32, 256)
# Every model with a float16 cache, and models with heads of 64 and of 16 features with the other types.
TINY_CASES = [
    *((name, "f16") for name in TINY_MODELS),
    *((name, kind) for name in ("Q8_0 large heads", "F32 odd") for kind in ("q8_0", "q4_0")),
    ("Q8_0 large heads", "q8_0:q4_0"),
]
TINY = pytest.mark.parametrize(("name", "kv_type"), TINY_CASES)


@contextmanager
def opened(
    path: Path, kv_type: str = "f16", *, threads: int = 2, max_sequences: int = 1, context_size: int = 512
) -> Iterator[CpuBackend]:
    with open_gguf(path) as file:
        backend = CpuBackend(
            file, OpenOptions(context_size=context_size, max_sequences=max_sequences, threads=threads, kv_type=kv_type)
        )
    try:
        yield backend
    finally:
        backend.close()


def prompt_of(count: int, vocabulary: int = 290, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, count)]


def prefill(backend: CpuBackend, tokens: Sequence[int], chunk: int, *, seq: int = 0) -> NDArray[np.float32]:
    """Return the logits of every token, prefilled in chunks of the given size."""
    parts = range(0, len(tokens), chunk)
    return np.concatenate([backend.forward(batch_of(rows(seq, at, tokens[at : at + chunk]))).logits for at in parts])


# --- tiny models -----------------------------------------------------------------------------------------------------

TINY_PROMPT = prompt_of(280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@cache
def tiny_expected(path: Path, kv_type: str = "f16") -> NDArray[np.float32]:
    with opened(path, kv_type) as backend:
        return prefill(backend, TINY_PROMPT, 256)


@pytest.mark.cover(1)
@TINY
@pytest.mark.parametrize("threads", THREADS)
def test_threads_and_chunks_change_nothing(folder: Path, name: str, kv_type: str, threads: int) -> None:
    path = tiny_model(folder, name)
    expected = tiny_expected(path, kv_type)
    with opened(path, kv_type, threads=threads) as backend:
        for chunk in CHUNKS:
            prompt = TINY_PROMPT[:90] if chunk == 1 else TINY_PROMPT
            np.testing.assert_array_equal(prefill(backend, prompt, chunk), expected[: len(prompt)])
            backend.kv.free(0)


@TINY
def test_a_reused_prefix_changes_nothing(folder: Path, name: str, kv_type: str) -> None:
    """The prefix is truncated, or copied to another sequence, at a block boundary and elsewhere."""
    path = tiny_model(folder, name)
    expected = tiny_expected(path, kv_type)
    with opened(path, kv_type, max_sequences=2) as backend:
        prefill(backend, TINY_PROMPT, 256)
        for kept in (1, 31, 32, 33, 64, 200, 279):
            backend.kv.copy(0, 1, kept)
            rest = backend.forward(batch_of(rows(1, kept, TINY_PROMPT[kept:]))).logits
            np.testing.assert_array_equal(rest, expected[kept:])
            backend.kv.truncate(0, kept)
            again = backend.forward(batch_of(rows(0, kept, TINY_PROMPT[kept:]))).logits
            np.testing.assert_array_equal(again, expected[kept:])


@pytest.mark.cover(1)
@TINY
@pytest.mark.parametrize("threads", [2, 3])
def test_company_changes_nothing(folder: Path, name: str, kv_type: str, threads: int) -> None:
    """The sequence is one of eight, and its rows come in pieces of other sizes and at every place in the batch."""
    path = tiny_model(folder, name)
    expected = tiny_expected(path, kv_type)
    with opened(path, kv_type, threads=threads, max_sequences=8) as backend:
        strangers = [prompt_of(280, seed=seq) for seq in range(8)]
        strangers[5] = TINY_PROMPT
        at = [0] * 8
        ours = []
        random = np.random.default_rng(0)
        while at[5] < len(TINY_PROMPT):
            triples = []
            for seq in random.permutation(8).tolist():
                count = min(int(random.integers(0, 40)), 280 - at[seq])
                triples += rows(seq, at[seq], strangers[seq][at[seq] : at[seq] + count])
                at[seq] += count
            if triples:
                batch = batch_of(triples)
                ours.append(backend.forward(batch).logits[batch.seq == 5])
        np.testing.assert_array_equal(np.concatenate(ours), expected)


@pytest.mark.cover(1)
@TINY
@pytest.mark.parametrize("threads", [2, 3])
def test_sequences_that_share_a_prefix_change_nothing(folder: Path, name: str, kv_type: str, threads: int) -> None:
    """Each sequence shares part of the prompt with the one before it and then runs 1 to 3 rows at a time."""
    path = tiny_model(folder, name)
    expected = tiny_expected(path, kv_type)
    lengths = [200, 192, 192, 190, 161, 160, 130, 64]
    with opened(path, kv_type, threads=threads, max_sequences=8) as backend:
        prefill(backend, TINY_PROMPT[: lengths[0]], 256)
        for seq in range(1, 8):
            assert backend.kv.copy(seq - 1, seq, lengths[seq]) == lengths[seq]
        at = list(lengths)
        for count in (1, 3, 2, 1, 1):
            triples = [row for seq in range(8) for row in rows(seq, at[seq], TINY_PROMPT[at[seq] : at[seq] + count])]
            logits = backend.forward(batch_of(triples)).logits.reshape(8, count, -1)
            for seq in range(8):
                np.testing.assert_array_equal(logits[seq], expected[at[seq] : at[seq] + count])
                at[seq] += count


@TINY
def test_asking_for_other_rows_changes_nothing(folder: Path, name: str, kv_type: str) -> None:
    path = tiny_model(folder, name)
    expected = tiny_expected(path, kv_type)
    batch = batch_of(rows(0, 0, TINY_PROMPT))
    with opened(path, kv_type) as backend:
        for rate in (0.5, 0.1, 0.01):
            want = np.random.default_rng(1).random(len(TINY_PROMPT)) < rate
            want[-1] = True
            flags = want * np.uint8(LOGITS)
            logits = backend.forward(Batch(batch.tokens, batch.seq, batch.pos, flags)).logits
            np.testing.assert_array_equal(logits, expected[want])
            backend.kv.free(0)


@pytest.mark.night
def test_kernels_that_were_just_compiled_answer_as_those_of_the_cache(folder: Path, tmp_path: Path) -> None:
    path = tiny_model(folder, "Q4_1 llama3 rope")
    program = f"""
from pathlib import Path
from tests.backends.cpu.test_sameness import TINY_PROMPT, digest, opened, prefill
with opened(Path({str(path)!r})) as backend:
    print(digest(prefill(backend, TINY_PROMPT, 256)))
"""
    cold = tmp_path / "cold"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"LLMRUN_CACHE_DIR": str(cold)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for _ in range(2)  # cold, then warm
    ]
    assert list((cold / "kernels").iterdir())
    assert outputs == [digest(tiny_expected(path))] * 2


def digest(logits: NDArray[np.float32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()


# --- the real model --------------------------------------------------------------------------------------------------

REAL_PROMPT = prompt_of(300, 49_000)
EARLY, LAST = 39, 299  # the compared rows; chunks of 1 stop at the first of them
DECODED = 4


@cache
def real_expected(kv_type: str = "f16") -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """Return (logits of the two rows, logits of each decoded token, the tokens)."""
    with opened(smollm2(), kv_type) as backend:
        compared = run_real(backend, REAL_PROMPT, 300)
        return compared, *decode(backend, compared[-1])


def run_real(backend: CpuBackend, tokens: Sequence[int], chunk: int, *, start: int = 0) -> NDArray[np.float32]:
    """Return the logits of the compared rows that `tokens` reaches, prefilled from `start` on."""
    compared = []
    for at in range(start, len(tokens), chunk):
        batch = batch_of(rows(0, at, tokens[at : at + chunk]))
        want = (batch.pos == EARLY) | (batch.pos == LAST)
        compared.append(backend.forward(Batch(batch.tokens, batch.seq, batch.pos, want)).logits)
    return np.concatenate(compared)


def decode(backend: CpuBackend, logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], list[int]]:
    """Return greedy tokens after the prompt, and the logits each of them produced."""
    steps, tokens = [], []
    for offset in range(DECODED):
        tokens.append(int(logits.argmax()))
        logits = backend.forward(batch_of(rows(0, LAST + 1 + offset, tokens[-1:]))).logits[0]
        steps.append(logits)
    return np.stack(steps), tokens


@pytest.mark.night
@pytest.mark.parametrize(("threads", "kv_type"), [*((threads, "f16") for threads in THREADS), (3, "q8_0"), (3, "q4_0")])
def test_the_real_model_over_threads_and_chunks(threads: int, kv_type: str) -> None:
    compared, steps, tokens = real_expected(kv_type)
    with opened(smollm2(), kv_type, threads=threads) as backend:
        for chunk in CHUNKS:
            prompt = REAL_PROMPT[: EARLY + 1] if chunk == 1 else REAL_PROMPT
            actual = run_real(backend, prompt, chunk)
            np.testing.assert_array_equal(actual, compared[: len(actual)])
            if chunk != CHUNKS[-1]:
                backend.kv.free(0)
        backend.kv.truncate(0, EARLY - 10)
        run_real(backend, REAL_PROMPT, 64, start=EARLY - 10)
        actual_steps, actual_tokens = decode(backend, compared[-1])
        np.testing.assert_array_equal(actual_steps, steps)
        assert actual_tokens == tokens


@pytest.mark.night
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_the_real_model_in_a_batch_of_eight_strangers(kv_type: str) -> None:
    compared, steps, tokens = real_expected(kv_type)
    with opened(smollm2(), kv_type, max_sequences=8) as backend:
        strangers = [prompt_of(300, 49_000, seed=seq) for seq in range(8)]
        strangers[0] = REAL_PROMPT
        ours = []
        for at in range(0, 300, 30):
            batch = batch_of(
                [row for seq in (3, 6, 0, 7, 1, 4, 2, 5) for row in rows(seq, at, strangers[seq][at : at + 30])]
            )
            want = (batch.pos == EARLY) | (batch.pos == LAST)
            ours.append(backend.forward(Batch(batch.tokens, batch.seq, batch.pos, want)).logits[batch.seq[want] == 0])
        np.testing.assert_array_equal(np.concatenate(ours), compared)
        for offset, token in enumerate(tokens):
            together = [row for seq in range(8) for row in rows(seq, 300 + offset, [token])]
            np.testing.assert_array_equal(backend.forward(batch_of(together)).logits[0], steps[offset])
