"""Frozen data types that several packages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LOGITS: Final = 1  # the value in Batch.want that requests a row's logits
HIDDEN: Final = 2  # the value in Batch.want that requests a row's hidden state

IMAGE_ROW: Final = -1  # the value in Batch.tokens of a row whose embedding is in Batch.embeds

LARGEST_SCALE: Final = 1000.0  # the maximum scale of a LoRA adapter; much larger scales overflow float32


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged step of n rows, each of which is a token at a position in a sequence.

    The rows of each sequence are ordered by position and start where the sequence's KV cache ends.

    tokens  int32[n]  token ids
    seq     int32[n]  sequence slot, 0 <= seq < max_sequences
    pos     int32[n]  position in the sequence, starting at 0
    want    uint8[n]  what is requested for each row: LOGITS, HIDDEN, both (LOGITS | HIDDEN) or nothing (0)
    scales  float32[n, adapters]  the scale of each of `ModelInfo.adapters` for each row; None if no row uses any
    embeds  float32[k, row width]  the embeddings of the k rows whose token is IMAGE_ROW, in their order; None if k is 0
    rope_pos  int32[n, 3]  the positions in time, height and width, for models with M-RoPE; None if all are `pos`
    ahead   int32[n]  how many of the following rows each row also attends to, in the layers that the model makes
            bidirectional for images; None for no rows. The whole image is in one batch
    """

    tokens: NDArray[np.int32]
    seq: NDArray[np.int32]
    pos: NDArray[np.int32]
    want: NDArray[np.uint8]
    scales: NDArray[np.float32] | None = None
    embeds: NDArray[np.float32] | None = None
    rope_pos: NDArray[np.int32] | None = None
    ahead: NDArray[np.int32] | None = None


class Outputs(NamedTuple):
    """The results of a step, in the order of its rows.

    logits  float32[rows that request LOGITS, vocabulary]
    hidden  float32[rows that request HIDDEN, hidden size]: the last hidden state, from which logits are computed
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that was opened with a model.

    scale       the scale for requests that do not choose adapters
    invocation  the tokens that activate the adapter from their last occurrence in a prompt; () if it is always active
    identity    a key that differs between adapters whose results differ
    """

    name: str
    path: str
    scale: float
    invocation: tuple[int, ...]
    identity: str


class LoadTimes(Struct, frozen=True):
    """Where the time for opening a model went.

    header_s   reading and checking the header of the file
    kernels_s  loading kernels, which the first run compiles
    tokenizer_s  creating the tokenizer while the weights are packed
    packing_s  reading and packing the weights
    backend_s  all of the backend's work, including kernels, tokenizer and packing
    packed_bytes  the size of the packed weights in memory
    page_faults, system_s  the page faults and the system time of the threads that packed; None if unknown
    """

    header_s: float
    kernels_s: float
    tokenizer_s: float
    packing_s: float
    backend_s: float
    packed_bytes: int
    page_faults: int | None = None
    system_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about an open model. Fields that a remote server does not report are 0 or ""."""

    path: str  # a file, or a remote model's endpoint, such as "http://127.0.0.1:8080/v1"
    name: str  # from `general.name`, or else the file name without its suffix
    architecture: str  # the exact value of `general.architecture`
    file_type: str  # the quantization, such as "Q4_K_M"
    parameters: int
    file_bytes: int
    vocabulary_size: int
    train_context: int  # context length that the model was trained with, in tokens
    context_size: int  # maximum number of tokens per sequence in this session
    max_sequences: int
    backend: str  # the backend's name in backends/registry.py, or "remote"
    device: str  # for example "2 threads, avx512vnni"; for remote models, the host
    threads: int  # 0 if unknown (remote)
    gpu_layers: str = ""  # number of layers on the GPU, such as "20/33"; empty if there are none
    hidden_size: int = 0  # features of a hidden state; 0 if the backend does not return them
    has_logits: bool = True  # False for encoders, which generate no text
    kv_type: str = "f16"  # precision of the KV cache, such as "q8_0" or "q8_0:q4_0"
    kv_bytes: int = 0  # size of the KV cache for all sequences; 0 if there is no cache
    suppressed_tokens: tuple[int, ...] = ()  # token IDs that the model file forbids
    weight_bytes: int = 0  # size of the tensors; 0 if unknown
    batch_invariant: bool = False  # True if no bit of a row's logits depends on the other rows of its step
    adapters: tuple[Adapter, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    load_times: LoadTimes | None = field(default=None, compare=False)  # None for backends that do not measure them

    @property
    def bits_per_weight(self) -> float:
        """The average size of a weight in bits, or 0 if unknown."""
        return 8 * self.weight_bytes / self.parameters if self.parameters else 0.0


class Pooling(IntEnum):
    """The ways to combine a model's hidden states into one vector or score, numbered as in the key `pooling_type`."""

    NONE = 0
    MEAN = 1
    CLS = 2  # the first token
    LAST = 3  # the last token
    RANK = 4  # a score for a query and a document, computed from the first token, or from the last with a causal mask


def named_pooling(metadata: Mapping[str, object], architecture: str) -> Pooling | None:
    """Return the pooling type in a model file, such as an embedding model's, or None if the file names no type."""
    found = metadata.get(f"{architecture}.pooling_type")
    return Pooling(found) if isinstance(found, int) and found in list(Pooling) and found != Pooling.NONE else None


class FinishReason(StrEnum):
    """The reason why generation ended, in OpenAI's terms. CANCELLED is specific to llmrun."""

    STOP = "stop"  # an end-of-generation token or a stop string was generated
    TOOL_CALLS = "tool_calls"  # the answer ended with tool calls
    LENGTH = "length"  # max_tokens was reached, or the context is full
    CANCELLED = "cancelled"  # the user pressed Ctrl-C


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log probability (natural logarithm) under the model, before sampling changes the distribution."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings (in seconds) and token counts of one request.

    The metrics are defined as in vLLM. Times are measured from the receipt of the request, so they exclude
    model loading.
    """

    load_s: float
    prompt_tokens: int
    cached_tokens: int  # prompt tokens reused from the KV cache
    generated_tokens: int
    prefill_s: float
    ttft_s: float
    decode_s: float  # the time from the first token to the last
    total_s: float  # the time from the request to the last token
    gaps_s: tuple[float, ...] = ()  # times between steps, or between chunks if a remote server sent the answer
    steps: int = 0  # forward passes that generated one or more tokens; 0 if unknown (remote)
    drafted_tokens: int = 0  # tokens that were predicted and then verified in a step
    accepted_tokens: int = 0  # drafted tokens that were accepted by the verification
    forced_tokens: int = 0  # tokens for which the response format or thinking budget left no alternative
    encoded_images: int = 0  # images whose embeddings had to be computed
    encode_s: float = 0.0  # the time for decoding and encoding them
    image_wait_s: float = 0.0  # the time in which the prompt waited for an image, which `prefill_s` does not include

    @property
    def prompt_per_second(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_per_second(self) -> float:
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.generated_tokens / self.steps if self.steps else 0.0

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0
