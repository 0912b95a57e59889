"""Computes importance matrices, which describe how large the inputs of each matrix are while a model reads a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.llama.imatrix_file import Entry
from llmrun.backends.registry import open_backend
from llmrun.base.errors import LlmrunError, UnsupportedModel
from llmrun.jobs.evaluation.measuring import batch_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions
    from llmrun.backends.cpu.team import InputSums, SummingTeam


class ImatrixCollector:
    """Adds up the squared inputs of a model on the CPU engine, chunk by chunk."""

    def __init__(self, backend: CpuBackend, team: SummingTeam) -> None:
        self._backend, self._team = backend, team
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self.chunks = 0

    def add(self, tokens: NDArray[np.int32]) -> int:
        """Run a chunk separately, add the chunk's inputs to the sums, and return the number of chunks so far.

        A chunk that fails or is cancelled leaves the sums unchanged.

        Raises the errors of `Backend.forward`, and LlmrunError if an input is not finite.
        """
        self._backend.kv.free(0)
        self._team.clear()
        wanted_from = 0 if self._team.needs_logits else len(tokens)
        self._backend.forward(batch_of(tokens, 0, 0, wanted_from))
        self._check(self._team.found)
        for found in self._team.found:
            for name in found.names:
                self._sums[name] = self._sums.get(name, 0) + found.sums
                self._counts[name] = self._counts.get(name, 0) + found.counts
        self.chunks += 1
        return self.chunks

    def entries(self) -> dict[str, Entry]:
        return {
            name: Entry(sums.reshape(-1).astype(np.float32), self._counts[name].astype(np.float32))
            for name, sums in self._sums.items()
        }

    def unused_experts(self) -> dict[str, int]:
        """Return the number of experts that were never used, for each matrix with such experts."""
        unused = {name: int((counts == 0).sum()) for name, counts in self._counts.items()}
        return {name: count for name, count in unused.items() if count}

    def _check(self, sums: list[InputSums]) -> None:
        for found in sums:
            if not np.isfinite(found.sums).all():
                path = self._backend.info.path
                raise LlmrunError(
                    f"{path}: chunk {self.chunks + 1}: the inputs of {found.names[0]} are not finite numbers",
                    hint=f"check the file: llmrun verify {path}",
                )


def open_cpu_backend(path: Path, options: OpenOptions) -> CpuBackend:
    """Open a model on the CPU engine. Raises the errors of `open_backend`."""
    try:
        backend = open_backend(path, options)
    except UnsupportedModel as error:
        raise UnsupportedModel(str(error), hint="llama.cpp's llama-imatrix may support this model") from error
    assert isinstance(backend, CpuBackend)
    return backend
