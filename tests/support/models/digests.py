"""Digests of the results of models, in a module that needs llmrun and NumPy, but neither the tests nor a compiler.

    python -m tests.support.models.digests < MODELS

As a program, for emulated machines and installed wheels, it prints the digests as JSON. MODELS are JSON: name ->
(path, KV cache type).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.types import HIDDEN, LOGITS, Batch, Pooling
from llmrun.engine.embedding import pooling_of
from llmrun.formats.gguf.reader import open_gguf

STEPS = (180, 64, 32, 16, 8, 4, 2, 1, 1)  # rows of each step; together, attention needs two chunks
CONTEXT = 512


class StableRandom:
    """Random numbers that depend on the seed alone: hashes (splitmix64) of consecutive integers."""

    def __init__(self, seed: int) -> None:
        self._next = seed << 40

    def bits(self, count: int) -> NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            x = (np.arange(self._next, self._next + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(
                0x9E3779B97F4A7C15
            )
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        self._next += count
        return x ^ (x >> np.uint64(31))

    def uniform(self, low: float, high: float, size: Any) -> NDArray[np.float64]:
        shape = np.atleast_1d(size).tolist()
        parts = (self.bits(prod(shape)) >> np.uint64(11)) * 2.0**-53
        return low + (high - low) * parts.reshape(shape)

    def standard_normal(self, size: Any) -> NDArray[np.float64]:
        """Return sums of 12 uniform numbers, which are nearly normal and need no logarithms."""
        total = np.full(np.atleast_1d(size).tolist(), -6.0)
        for _ in range(12):
            total += self.uniform(0.0, 1.0, total.shape)
        return total

    def tokens(self, count: int, vocabulary_size: int) -> list[int]:
        return [int(bits) % vocabulary_size for bits in self.bits(count)]


@contextmanager
def opened(path: Path, kv_type: str, threads: int) -> Iterator[CpuBackend]:
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(context_size=CONTEXT, threads=threads, kv_type=kv_type))
    try:
        yield backend
    finally:
        backend.close()


def digest_of_results(path: Path, kv_type: str, *, threads: int = 2) -> str:
    """Run the steps and return the first 16 hexadecimal digits of the sha256 of the results.

    They are the logits of all rows, or the hidden states of encoders and rerankers. Each of an encoder's steps is a
    text of its own, because its rows attend to later ones.
    """
    digest = hashlib.sha256()
    with opened(path, kv_type, threads) as backend:
        is_embedder = pooling_of(backend.info) is Pooling.RANK or not backend.info.has_logits
        tokens, at = StableRandom(2).tokens(sum(STEPS), backend.info.vocabulary_size), 0
        for count in STEPS:
            positions = np.arange(count, dtype=np.int32) + (at if backend.info.has_logits else 0)
            want = np.full(count, HIDDEN if is_embedder else LOGITS, np.uint8)
            batch = Batch(np.array(tokens[at : at + count], np.int32), np.zeros(count, np.int32), positions, want)
            found = backend.forward(batch)
            results = found.hidden if is_embedder else found.logits
            assert np.isfinite(results).all()
            digest.update(np.ascontiguousarray(results, "<f4").tobytes())
            if not backend.info.has_logits:
                backend.kv.free(0)
            at += count
    return digest.hexdigest()[:16]


def main() -> None:
    for name, (path, kv_type) in json.load(sys.stdin).items():
        digest = digest_of_results(Path(path), kv_type, threads=1)
        sys.stdout.write(json.dumps([name, digest]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
