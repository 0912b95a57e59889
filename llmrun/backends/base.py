"""The seam: what the engine asks of a backend. Token ids go in, logits come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.tokenizers.base import Tokenizer
    from llmrun.types import Batch, ModelInfo


class KVCache(Protocol):
    """The keys and values a backend keeps per sequence slot, so that a known prefix is never computed twice.

    `kept` (<= n) is the longest prefix that is still valid: a sliding window or a recurrent state may have dropped
    what came before, and the engine prefills from there.
    """

    @property
    def capacity(self) -> int:
        """Tokens the cache can hold, all sequences together."""

    def copy(self, src: int, dst: int, n: int) -> int:
        """Let sequence dst begin with the first n tokens of src (dst's own are freed first). Returns kept."""

    def truncate(self, seq: int, n: int) -> int:
        """Keep only the first n tokens of a sequence. Returns kept."""

    def free(self, seq: int) -> None:
        """Forget a sequence."""


class Backend(Protocol):
    """One open model."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def kv(self) -> KVCache: ...

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step; float32[number of wanted rows, vocabulary], in row order.

        The array belongs to the caller. Raises KVFull before anything has changed when the cache has no room, and
        Cancelled when `cancel` was called since the last pass ended; then the sequences are as they were before the
        step, or as much of them as could be kept: `kv.truncate` to the former length tells.
        """

    def cancel(self) -> None:
        """Stop the forward pass that is running or, when none is, the next one as it begins: one pass, once.

        For another thread or a signal handler, which cannot know whether a pass is just about to begin. It may come
        too late: the caller keeps his own note of what he wants ended. A pass stopped for nobody may be run again.
        """

    def close(self) -> None:
        """End the workers and free everything. Idempotent; nothing else may be called afterwards."""
