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
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS, Batch, Pooling
from llmrun.engine.embedding import pooling_of
from llmrun.formats.gguf.reader import open_gguf

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

IMAGES = "numerics.images"  # key of models that run images: ONE_WAY, or BOTH_WAYS if rows also attend to later rows
ONE_WAY, BOTH_WAYS = "one way", "both ways"
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
        options = OpenOptions(context_size=CONTEXT, threads=threads, kv_type=kv_type)
        backend = CpuBackend(file, options, vision=_vision_of(file))
    try:
        yield backend
    finally:
        backend.close()


def _vision_of(file: GGUFFile) -> Any:
    """Return a projector without an encoder, or None for models that run no images."""
    if not file.has(IMAGES):
        return None
    architecture = file.string("general.architecture")
    parts = 1 + file.integer(f"{architecture}.n_deepstack_layers", 0, minimum=0)
    width = parts * file.integer(f"{architecture}.embedding_length", minimum=1)
    projector = SimpleNamespace(
        row_width=width,
        uses_mrope=file.has(f"{architecture}.rope.dimension_sections"),
        is_causal=file.string(IMAGES) == ONE_WAY,
        most_rows=max(STEPS),
        weight_bytes=0,
        memory_bytes=0,
    )
    return SimpleNamespace(projector=projector, close=lambda: None)


def _with_image(batch: Batch, backend: CpuBackend, random: StableRandom) -> Batch:
    """Return the batch of a step in which the middle half of the rows are an image with a grid of two rows."""
    assert backend.vision is not None
    count, projector, rope_pos = len(batch.tokens) // 2, backend.vision.projector, np.repeat(batch.pos[:, None], 3, 1)
    first = count // 2
    rows = slice(first, first + count)
    tokens, ahead = batch.tokens.copy(), np.zeros(len(batch.tokens), np.int32)
    tokens[rows], ahead[rows] = IMAGE_ROW, np.arange(count)[::-1]
    grid = np.divmod(np.arange(count), max(1, count // 2))
    rope_pos[rows] = batch.pos[first] + np.stack([np.zeros(count, np.int64), *grid], 1)
    return replace(
        batch,
        tokens=tokens,
        embeds=random.standard_normal((count, projector.row_width)).astype(np.float32),
        rope_pos=rope_pos if f"{backend.info.architecture}.rope.dimension_sections" in backend.info.metadata else None,
        ahead=None if projector.is_causal else ahead,
    )


def digest_of_results(path: Path, kv_type: str, *, threads: int = 2) -> str:
    """Run the steps and return the first 16 hexadecimal digits of the sha256 of the results.

    They are the logits of all rows, or the hidden states of encoders and rerankers. Each of an encoder's steps is a
    text of its own, because its rows attend to later ones. Models with the key IMAGES have an image in each step.
    """
    digest = hashlib.sha256()
    with opened(path, kv_type, threads) as backend:
        is_embedder = pooling_of(backend.info) is Pooling.RANK or not backend.info.has_logits
        random = StableRandom(2)
        tokens, at = random.tokens(sum(STEPS), backend.info.vocabulary_size), 0
        for count in STEPS:
            positions = np.arange(count, dtype=np.int32) + (at if backend.info.has_logits else 0)
            want = np.full(count, HIDDEN if is_embedder else LOGITS, np.uint8)
            batch = Batch(np.array(tokens[at : at + count], np.int32), np.zeros(count, np.int32), positions, want)
            if backend.vision is not None and count > 1:
                batch = _with_image(batch, backend, random)
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
