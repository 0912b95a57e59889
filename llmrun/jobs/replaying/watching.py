"""A backend that passes every call on to the CPU engine and keeps digests of its logits."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import UsageError
from llmrun.base.types import LOGITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.backends.base import Backend, DraftHead, KVCache
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.base.types import Batch, ModelInfo, Outputs
    from llmrun.model.tokenizers.base import Tokenizer

_DIGITS = 16  # of a digest


class WatchedBackend:
    """A wrapper around the CPU engine's backend, which records tokens and digests of logits.

    Hashing the logits of a step takes 0.1 ms for 49,152 tokens.

    tokens  the token that was run last at each position
    logits  the digests of all logits computed at each position, oldest first. Rows of wrong drafts are among them
    """

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self.clear()

    def clear(self) -> None:
        """Forget all tokens and digests."""
        self.tokens: dict[int, int] = {}
        self.logits: dict[int, list[str]] = {}

    def op_digests(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        """See CpuBackend.op_digests."""
        return self._backend.op_digests(tokens)

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    @property
    def draft_head(self) -> DraftHead | None:
        return self._backend.draft_head

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def kv(self) -> KVCache:
        return self._backend.kv

    def forward(self, batch: Batch) -> Outputs:
        outputs = self._backend.forward(batch)
        self.tokens.update(zip(batch.pos.tolist(), batch.tokens.tolist(), strict=True))
        for position, row in zip(batch.pos[batch.want & LOGITS != 0].tolist(), outputs.logits, strict=True):
            digest = hashlib.sha256(np.ascontiguousarray(row, "<f4").tobytes()).hexdigest()[:_DIGITS]
            self.logits.setdefault(position, []).append(digest)
        return outputs

    def cancel(self) -> None:
        self._backend.cancel()

    def close(self) -> None:
        self._backend.close()


class Watcher:
    """Passed to `Engine.open` as `watch`. `backend` is set once the model is open."""

    backend: WatchedBackend

    def __call__(self, backend: Backend) -> Backend:
        """Wrap the backend. Raises UsageError if it is not the CPU engine's."""
        from llmrun.backends.cpu.backend import CpuBackend

        if not isinstance(backend, CpuBackend):
            raise UsageError(
                f"only the CPU engine can repeat a run bit for bit, and this model runs on {backend.info.backend}",
                hint="add --backend cpu",
            )
        self.backend = WatchedBackend(backend)
        return self.backend
