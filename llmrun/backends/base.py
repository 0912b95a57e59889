"""The interface between the engine and its backends, called the seam.

Token ids go in, and logits or hidden states come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from llmrun.backends.device_lists import SPLIT_MODES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.saved_parts import SavedPart
    from llmrun.base.types import Batch, ModelInfo, Outputs
    from llmrun.model.tokenizers.base import Tokenizer

AUTO: Final = "auto"  # selects the best backend, or as many GPU layers as fit

# The most rows of an answer in a step: its last token and a draft. Each can need logits.
ROWS_PER_ANSWER: Final = 16

Progress = Callable[[str, float], None]  # called with a description of the current work and the fraction completed


def _discard(value: object) -> None:
    """Discard an explanation or a tokenizer."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options for opening a model. The command line creates this object, and the backend receives it unchanged.

    backend        a name in the registry, or "auto"
    context_size   maximum tokens per sequence, or None for a default that fits (sizing/context_size.py)
    max_sequences  maximum number of requests that run at a time
    kv_tokens      tokens in the KV cache, which all sequences share: a number, "auto" for a context per sequence or for
                   as many tokens as fit, but at least one context, or None for a context per sequence
    cached_prefixes  number of additional sequences, which keep prefixes of finished requests. Backends whose sequences
                   need memory of their own have fewer
    threads        number of threads, or None for one per physical core
    kv_type        precision of the KV cache, in the notation of layouts/kv_types.py
    reserved_memory  bytes of free memory to leave for others, such as a cache that another model has not filled yet
    gpu_layers     layers to run on GPUs: a number, "all", or "auto" for as many as fit; ignored by CPU-only backends
    tensor_split   the proportion of these layers for each device, as in "3,1", or "" for proportions of the free memory
    split_mode     how to divide a model among devices, one of device_lists.SPLIT_MODES
    main_gpu       the number of the device that runs all layers if `split_mode` is "none"
    rpc            llama.cpp's RPC servers, as in "10.0.0.2:50052,box:50052", whose devices are used like GPUs
    rpc_anyway     allow RPC servers at addresses that are not private
    keeps_rows     always keep the last 16 tokens removable, as a draft model needs. With a recurrent state, this makes
                   each step slower
    draft_head     load the model's draft head, if it has one that the backend supports
    saves_state    allow KVCache.save and KVCache.load, which need a key that takes a few milliseconds to compute
    adapters       LoRA adapters that requests can use, each in the notation of --lora: [NAME=]FILE[:SCALE]
    progress       called with the progress of loading or compiling
    explain        called with a short text that says which backend "auto" chose, and why
    on_tokenizer   may be called with the tokenizer once it is loaded, while the weights are still being read
    """

    backend: str = AUTO
    context_size: int | None = None
    max_sequences: int = 1
    kv_tokens: int | str | None = None
    cached_prefixes: int = 0
    threads: int | None = None
    kv_type: str = "f16"
    reserved_memory: int = 0
    gpu_layers: int | str = AUTO
    tensor_split: str = ""
    split_mode: str = SPLIT_MODES[0]
    main_gpu: int | None = None
    rpc: str = ""
    rpc_anyway: bool = False
    keeps_rows: bool = False
    draft_head: bool = False
    saves_state: bool = False
    adapters: Sequence[str] = ()
    progress: Progress | None = None
    explain: Callable[[str], None] = _discard
    on_tokenizer: Callable[[Tokenizer], None] = _discard

    def without_gpus(self) -> OpenOptions:
        """Return a copy of these options that puts no layers on a GPU."""
        return replace(self, gpu_layers=0)

    def without_rpc(self) -> OpenOptions:
        """Return a copy of these options that uses only devices of this machine, divided in the default way."""
        if not self.rpc:
            return self
        return replace(self, rpc="", tensor_split="", split_mode=SPLIT_MODES[0], main_gpu=None)


class KVCache(Protocol):
    """The keys and values that a backend stores for each sequence, to avoid computing the same prefix twice.

    `copy` and `truncate` return `kept` (<= n), the length of the prefix that is still valid. It can be shorter than
    requested because a sliding window or a recurrent state may have discarded older tokens. The engine prefills the
    rest.
    """

    @property
    def capacity(self) -> int:
        """The total number of tokens that the cache can hold across all sequences."""

    @property
    def block_size(self) -> int:
        """The number of tokens in a block, the unit in which the cache allocates memory."""

    @property
    def free_blocks(self) -> int:
        """A lower bound of the number of blocks that no sequence holds. It can be negative."""

    def needed(self, seq: int, n: int) -> int:
        """Return an upper bound of the number of free blocks that a sequence takes to grow to n tokens."""

    def held(self, sequences: Sequence[int]) -> int:
        """Return a lower bound of the number of blocks that would become free if these sequences were freed."""

    def copy(self, src: int, dst: int, n: int) -> int:
        """Replace the contents of sequence dst with the first n tokens of src. Returns kept."""

    def truncate(self, seq: int, n: int) -> int:
        """Shorten a sequence to its first n tokens. Returns kept."""

    def free(self, seq: int) -> None:
        """Remove all tokens of a sequence."""

    @property
    def key(self) -> str:
        """Identifies everything that determines the contents of saved parts, such as the model and the KV type.

        It is empty unless `OpenOptions.saves_state` was set. Parts must not be saved or loaded under an empty key.
        """

    @property
    def saves_blocks(self) -> bool:
        """Whether saving a sequence that has grown adds new parts. If not, the whole sequence becomes one new part."""

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return parts from which the first n tokens of a sequence can be loaded later, in order of position.

        Their data is read only when it is needed, which must happen before the sequence changes. Some backends can only
        save all tokens of a sequence, even if n is smaller.
        """

    def load(self, seq: int, parts: Sequence[SavedPart]) -> int:
        """Replace the contents of a sequence with parts that were saved under the same key. Returns kept.

        The sizes of the parts are checked. Only the positions before a damaged part are loaded. Raises KVFull if there
        is no room for all of them, and then the sequence is empty.
        """


class DraftHead(Protocol):
    """The part of a model that predicts the token after the next one (multi-token prediction).

    A row is a token at its position, together with the model's hidden state at the position before. The head has a
    cache of its own, with as many sequences and tokens as the model's.
    """

    @property
    def info(self) -> ModelInfo:
        """The model's information."""

    @property
    def kv(self) -> KVCache: ...

    @property
    def drafted_tokens(self) -> int:
        """The number of tokens whose logits are computed, which are the first ones of the vocabulary."""

    def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
        """Run one forward pass of at most 256 rows.

        hidden  float32[rows, hidden size], the hidden state of each row

        Returns logits float32[rows that want LOGITS, drafted_tokens] for the token after the row's, and the head's own
        hidden states, which stand in for those of the model at the position of the row. Raises the errors of
        `Backend.forward`.
        """

    def cancel(self) -> None:
        """See `Backend.cancel`."""


class Backend(Protocol):
    """An open model."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def draft_head(self) -> DraftHead | None:
        """The model's draft head, or None if it has none or `OpenOptions.draft_head` was not set."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def kv(self) -> KVCache: ...

    def forward(self, batch: Batch) -> Outputs:
        """Run one forward pass and return what the batch wants. The caller owns the arrays.

        Raises KVFull, before anything changes, if the cache has no room. Raises Cancelled if `cancel` was called since
        the last pass ended. After either error, each sequence is restored to its state before the pass. Some backends
        can only restore a prefix of it, so call `kv.truncate` with the former length to find out how much is left.
        """

    def cancel(self) -> None:
        """Stop the running forward pass or, if none is running, the next one. Each call stops at most one pass.

        This can be called from other threads and from signal handlers, which cannot know whether a pass is about to
        start. The pass may already have finished, so callers must also record that they want to stop. It is safe to
        repeat a pass that was stopped by mistake.
        """

    def close(self) -> None:
        """Stop the workers and free all resources. This is idempotent, but no other method may be called afterwards."""
