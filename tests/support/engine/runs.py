"""Run the CPU engine on one sequence, in steps of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows


def logits_in_steps(
    path: Path, tokens: Sequence[int], steps: Sequence[int], threads: int, context_size: int = 512
) -> NDArray[np.float32]:
    """Return the logits, float32[tokens, vocabulary]. `steps` gives the number of tokens in each step."""
    assert sum(steps) == len(tokens)
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(context_size=context_size, threads=threads))
    try:
        ends = np.cumsum(steps).tolist()
        parts = [
            backend.forward(batch_of(rows(0, end - step, tokens[end - step : end]))).logits
            for end, step in zip(ends, steps, strict=True)
        ]
        return np.concatenate(parts)
    finally:
        backend.close()
