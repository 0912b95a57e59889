"""Drafts by a small model with the same vocabulary, which runs on a backend of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.engine.drafting.sequence import SequenceDrafter, SequenceSource
from llmrun.model.tokenizers.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.base.types import Batch
    from llmrun.engine.requests import Request
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


def check_same_vocabulary(draft: Backend, target: Backend) -> None:
    """Raise UsageError unless tokens with the same id are equal and the same tokens end answers.

    One of the vocabularies may be longer, because files pad vocabularies to different sizes.
    """
    if words := difference_in_words(draft, target):
        raise UsageError(
            f"draft model has a different vocabulary: {words}", hint="choose a draft model of the same family"
        )


def difference_in_words(one: Backend, other: Backend) -> str:
    """Describe the first token in which two vocabularies differ, or return "". Ignores additional tokens."""
    token = _first_difference(one.tokenizer, other.tokenizer, min(one.info.vocabulary_size, other.info.vocabulary_size))
    if token is None:
        return ""
    words = _token_words(one.tokenizer, token), _token_words(other.tokenizer, token)
    return f"{one.info.path}: token {token} is {words[0]}, but {words[1]} in {other.info.path}"


def _first_difference(one: Tokenizer, other: Tokenizer, size: int) -> int | None:
    """Return the first token below `size` that differs, or None."""
    ending = one.end_of_generation ^ other.end_of_generation
    differing = min((token for token in ending if token < size), default=None)
    if isinstance(one, TextTokenizer) and one.begins_like(other, size):
        return differing
    texts = (
        token
        for token in range(size)
        if one.token_text(token) != other.token_text(token) or one.token_bytes(token) != other.token_bytes(token)
    )
    return next(texts, differing)


def _token_words(tokenizer: Tokenizer, token: int) -> str:
    kind = " (ends an answer)" if token in tokenizer.end_of_generation else ""
    kind = kind or (" (control token)" if tokenizer.token_text(token) and not tokenizer.token_bytes(token) else "")
    return f"{tokenizer.token_text(token)!r}{kind}"


def open_draft_model(path: Path, options: OpenOptions, target: Backend) -> ModelSource:
    """Open a draft model for `target`, with the same backend, context size, number of sequences and threads.

    On the CPU engine, the KV cache of `target` still counts as free memory, because none of it has been used yet, but
    the draft model leaves this memory free. Raises UsageError if the vocabularies differ, and the errors of
    `Engine.open`.
    """
    from llmrun.backends.registry import open_backend

    info = target.info
    opened = open_backend(
        path,
        replace(
            options.without_rpc(),  # An RPC server has one client, and a draft model fits on this machine.
            adapters=(),
            mmproj="",
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
    """A draft model, which can draft the tokens that both models have."""

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
