"""Drafts by a small model with the same vocabulary, which runs on a backend of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.engine.drafting.sequence import SequenceDrafter, SequenceSource
from llmrun.engine.drafting.vocabularies import check_same_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.base.types import Batch
    from llmrun.engine.requests import Request


def open_draft_model(path: Path, options: OpenOptions, target: Backend) -> ModelSource:
    """Open a draft model for `target`, with the same backend, context size, number of sequences and threads.

    On the CPU engine, the KV cache of `target` still counts as free memory, because none of it has been used yet. The
    draft model leaves this memory free. Raises UsageError if the vocabularies differ, and the errors of `Engine.open`.
    """
    from llmrun.backends.select import open_backend

    info = target.info
    opened = open_backend(
        path,
        replace(
            options.without_rpc(),  # A server has one client, and a draft model fits on this machine.
            adapters=(),
            backend=info.backend,
            context_size=info.context_size,
            threads=info.threads,
            keeps_rows=True,
            reserved_memory=info.kv_bytes if info.backend == "cpu" else 0,  # llama.cpp has zeroed its cache
        ),
    )
    try:
        check_same_vocabulary(opened, target)
        return ModelSource(opened, info.vocabulary_size)
    except BaseException:
        opened.close()
        raise


class ModelSource(SequenceSource):
    """A draft model. It can draft the tokens that both models have."""

    name = "model"

    def __init__(self, backend: Backend, vocabulary_size: int) -> None:
        """Create a source that owns an open backend."""
        super().__init__(backend.info, backend.kv, min(vocabulary_size, backend.info.vocabulary_size))
        self.backend = backend

    def drafter(self, request: Request) -> ModelDrafter:
        return ModelDrafter(self, request)

    def cancel(self) -> None:
        self.backend.cancel()

    def close(self) -> None:
        self.backend.close()


class ModelDrafter(SequenceDrafter):
    """Drafts the tokens of one answer with a draft model."""

    def __init__(self, source: ModelSource, request: Request) -> None:
        super().__init__(source, request)
        self._backend = source.backend

    def _forward(self, batch: Batch) -> NDArray[np.float32]:
        return self._backend.forward(batch).logits
