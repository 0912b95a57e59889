"""The types that rooms share. They are frozen and have no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged step of n rows. Each row is a token at a position in a sequence.

    The rows of a sequence are ordered by position and continue where its KV cache ends.

    tokens  int32[n]  token ids
    seq     int32[n]  sequence slot, 0 <= seq < max_sequences
    pos     int32[n]  position in the sequence, starting at 0
    want    bool[n]   rows whose logits are requested
    """

    tokens: NDArray[np.int32]
    seq: NDArray[np.int32]
    pos: NDArray[np.int32]
    want: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about an open model for the engine and the user. Facts that a server does not report are 0 or ""."""

    path: str  # for remote models, the endpoint: "http://127.0.0.1:8080/v1"
    name: str  # general.name, or the file's stem
    architecture: str  # general.architecture, exact
    file_type: str  # the weight type that takes the most bytes, such as "Q4_1"
    parameters: int
    file_bytes: int
    vocabulary_size: int
    train_context: int  # tokens the model was trained for
    context_size: int  # tokens one sequence may hold in this session
    max_sequences: int
    backend: str  # its name in the registry (backends/registry.py), or "remote"
    device: str  # "2 threads, avx512vnni"; for remote models, the host
    threads: int  # 0 if unknown (remote)
    gpu_layers: str = ""  # layers that run on the GPU, such as "20/33"; empty for none
    kv_type: str = "f16"  # precision of the KV cache: "f16" or "q8_0"
    kv_bytes: int = 0  # size of the full KV cache for all sequences; 0 if there is none
    suppressed_tokens: tuple[int, ...] = ()  # tokens that must never be generated, according to the model file
    metadata: Mapping[str, Any] = field(default_factory=dict)


class FinishReason(StrEnum):
    """The reason why generation ended, in OpenAI's terms. CANCELLED is specific to llmrun."""

    STOP = "stop"  # end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    CANCELLED = "cancelled"  # Ctrl-C


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural-log probability under the model, before sampling changes the distribution."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Timings:
    """The timings (in seconds) and token counts of one request.

    The definitions are vLLM's: times start when the request is received, with the model already loaded.
    """

    load_s: float
    prompt_tokens: int
    cached_tokens: int  # prompt tokens reused from the KV cache
    generated_tokens: int
    prefill_s: float
    ttft_s: float
    decode_s: float  # from the first token to the last token
    total_s: float  # from the request to the last token
    gaps_s: tuple[float, ...] = ()  # latencies between tokens, or between the chunks that a server sends

    @property
    def prompt_per_second(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_per_second(self) -> float:
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0
