#!/usr/bin/env python3
"""Measure a model's steps and the drafts of its head, and print the speed-up that drafts can reach.

    scripts/measure_draft_head.py MODEL.gguf [--threads N] [--rounds N]

The weights may be random. `scripts/make_models.py FOLDER Q4_K_M --shape qwen3.5-2b-mtp` writes such a model.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import accumulate, repeat
from operator import mul
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.types import HIDDEN, LOGITS, Batch
from llmrun.engine.drafting.base import LONGEST_DRAFT
from llmrun.formats.gguf.reader import open_gguf

DEPTH = 256  # tokens in the cache
ROWS = 5  # of a step with a draft
ACCEPTANCES = (0.6, 0.75, 0.85)


def batch(first: int, n: int, want: int) -> Batch:
    return Batch(
        np.arange(n, dtype=np.int32) + 1000,
        np.zeros(n, np.int32),
        np.arange(first, first + n, dtype=np.int32),
        np.full(n, want, np.uint8),
    )


class Timed:
    """The times of one kind of pass, in seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def ms(self) -> float:
        return 1000 * median(self.seconds)


def measure(backend: CpuBackend, rounds: int) -> tuple[Timed, ...]:
    """Run the passes in turns, so that a change of the machine's speed affects all of them."""
    head = backend.draft_head
    if head is None:
        sys.exit(f"{backend.info.path} has no draft head")
    states = np.random.default_rng(0).standard_normal((DEPTH, backend.info.hidden_size)).astype(np.float32)
    step, many = Timed("step of 1 row"), Timed(f"step of {ROWS} rows")
    draft, feed = Timed("draft"), Timed(f"{DEPTH} rows of the head, without logits")
    prompt = Timed(f"{DEPTH} rows of the model, without logits")
    for _ in range(rounds):
        with prompt:
            backend.forward(batch(0, DEPTH, 0))
        with feed:
            head.forward(batch(0, DEPTH, 0), states)
        for n in range(8):
            with step:
                backend.forward(batch(DEPTH + n, 1, LOGITS))
            with draft:
                head.forward(batch(DEPTH + n, 1, LOGITS | HIDDEN), states[:1])
        with many:
            backend.forward(batch(DEPTH + 8, ROWS, LOGITS | HIDDEN))
        backend.kv.free(0)
        head.kv.free(0)
    return step, many, draft, prompt, feed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with open_gguf(options.model) as file:
        backend = CpuBackend(file, OpenOptions(context_size=512, threads=options.threads, draft_head=True))
    try:
        step, many, draft, prompt, feed = timed = measure(backend, options.rounds)
    finally:
        backend.close()
    for one in timed:
        print(f"{one.name:<42} {one.ms:8.2f} ms  ({min(one.seconds) * 1000:.2f} to {max(one.seconds) * 1000:.2f})")
    row = (many.ms / step.ms - 1) / (ROWS - 1)
    print(f"a draft takes {draft.ms / step.ms:.3f} steps, and each additional row {row:.3f}")
    print(f"the head makes prompts {feed.ms / prompt.ms:.1%} slower")
    for acceptance in ACCEPTANCES:
        speedup, length = reachable_speedup(acceptance, draft.ms / step.ms, row)
        print(f"{acceptance:.0%} accepted: {speedup:.2f}x with drafts of {length} tokens")


def reachable_speedup(acceptance: float, draft_cost: float, row_cost: float) -> tuple[float, int]:
    """Return (speed-up, draft length) for the draft length that gives the most tokens per second.

    acceptance  the probability that a draft token is right if all draft tokens before it are right
    draft_cost  the time to draft a token, in steps without drafts
    row_cost    the time that each additional row adds to a step, in steps without drafts

    A step with n draft tokens yields 1 + a + a^2 + ... + a^n tokens (Leviathan et al., arXiv:2211.17192) and takes
    1 + n (draft_cost + row_cost). If drafts do not pay, the result is (1.0, 0).
    """
    tokens = accumulate(accumulate(repeat(acceptance, LONGEST_DRAFT), mul, initial=1.0))
    speedups = [gained / (1 + n * (draft_cost + row_cost)) for n, gained in enumerate(tokens)]
    best = max(speedups)
    return best, speedups.index(best)


if __name__ == "__main__":
    main()
