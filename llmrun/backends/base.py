"""The seam: what the engine asks of a backend. Token ids go in, logits come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.tokenizers.base import Tokenizer
    from llmrun.types import Batch, ModelInfo

AUTO: Final = "auto"  # the best backend, or as many layers on GPUs as fit
KV_TYPES: Final = ("f16", "q8_0")

Progress = Callable[[str, float], None]  # (what is being done, fraction done)


def _explain_to_nobody(words: str) -> None:
    """Drop the explanation."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a model. Made once, by the code that reads the flags, and passed unchanged to the backend.

    backend        a name in the registry, or "auto"
    context_size   tokens that one sequence may hold; None: what fits (sizing/context_size.py)
    max_sequences  sequences that the KV cache holds at once
    threads        None: one per physical core
    kv_type        precision of the KV cache, one of KV_TYPES
    gpu_layers     layers to run on GPUs: a number, "all", or "auto" for as many as fit; for backends that use GPUs
    progress       called with how far loading, or compiling, has come
    explain        called with a few words on which backend "auto" chose, and why
    """

    backend: str = AUTO
    context_size: int | None = None
    max_sequences: int = 1
    threads: int | None = None
    kv_type: str = "f16"
    gpu_layers: int | str = AUTO
    progress: Progress | None = None
    explain: Callable[[str], None] = _explain_to_nobody

    def without_gpus(self) -> OpenOptions:
        """Return the same options with no layer on a GPU."""
        return replace(self, gpu_layers=0)


class KVCache(Protocol):
    """The keys and values a backend keeps per sequence slot, so that a known prefix is never computed twice.

    `kept` (<= n) is the longest prefix that is still valid: a sliding window or a recurrent state may have dropped
    what came before, and the engine prefills from there.
    """

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold for all sequences together."""

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
        """Run one step. Returns float32[number of wanted rows, vocabulary], in row order.

        The array belongs to the caller. Raises KVFull, before changing anything, if the cache has no room, and
        Cancelled if `cancel` was called since the last pass ended. The sequences are then as they were before the
        step, or as much of them as could be kept: `kv.truncate` to the former length says how much.
        """

    def cancel(self) -> None:
        """Stop the running forward pass or, if there is none, the next one as it begins: one pass, once.

        For other threads and signal handlers, which cannot know whether a pass is about to begin. It may come too
        late, so callers must keep their own note of what they want ended. A pass that was stopped needlessly may be
        run again.
        """

    def close(self) -> None:
        """End the workers and free everything. Idempotent; nothing else may be called afterwards."""
