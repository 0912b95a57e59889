"""The values that cross a wall between two rooms. Frozen, and without behaviour."""

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
    """One ragged step: n rows, each a token at a position of a sequence.

    Rows of one sequence are in order of position and follow what its KV cache already holds.

    tokens  int32[n]  token ids
    seq     int32[n]  sequence slot, 0 <= seq < max_sequences
    pos     int32[n]  position in the sequence, from 0
    want    bool[n]   rows whose logits are asked for
    """

    tokens: NDArray[np.int32]
    seq: NDArray[np.int32]
    pos: NDArray[np.int32]
    want: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the user need to know about an open model. 0 and "" are what a server does not say."""

    path: str  # of a remote model its endpoint: "http://127.0.0.1:8080/v1"
    name: str  # general.name, or the file's stem
    architecture: str  # general.architecture, exact
    file_type: str  # most common weight type by bytes, as "Q4_1"
    parameters: int
    file_bytes: int
    vocabulary_size: int
    train_context: int  # tokens the model was trained for
    context_size: int  # tokens one sequence may hold in this session
    max_sequences: int
    backend: str  # its name in the registry (backends/registry.py), or "remote"
    device: str  # "2 threads, avx512vnni"; of a remote model its host
    threads: int  # 0: not ours to say
    gpu_layers: str = ""  # "20/33": how many of its layers a GPU runs; empty: none
    kv_type: str = "f16"  # of the numbers in the KV cache: "f16", "q8_0"
    kv_bytes: int = 0  # of the KV cache when it is full, all sequences together; 0: there is none
    suppressed_tokens: tuple[int, ...] = ()  # that it is never to write, by its own file
    metadata: Mapping[str, Any] = field(default_factory=dict)


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words; CANCELLED is ours."""

    STOP = "stop"  # end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    CANCELLED = "cancelled"  # Ctrl-C


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural-log probability under the model (before sampling changes the distribution)."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts of one request; vLLM's definitions (TTFT from request in hand, model already loaded)."""

    load_s: float
    prompt_tokens: int
    cached_tokens: int  # of them, taken over from the KV cache
    generated_tokens: int
    prefill_s: float
    ttft_s: float
    decode_s: float  # first token out to last token out
    total_s: float  # request in hand to last token out
    gaps_s: tuple[float, ...] = ()  # inter-token latencies: one less than tokens, or than pieces that a server sends

    @property
    def prompt_per_second(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_per_second(self) -> float:
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0
