"""libllama's samplers, called through llama-cpp-python's low-level API. They are the oracle for ours."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import llama_cpp
import numpy as np

from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class Applied(NamedTuple):
    """The candidates after a sampler, in its order. `selected` is the id that it chose, or -1."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    is_sorted: bool
    selected: int


class LlamaSampler:
    """A sampler of libllama. Floats are passed as float32."""

    def __init__(self, name: str, *arguments: Any) -> None:
        """Create the sampler with `llama_sampler_init_<name>`."""
        self._sampler = getattr(llama_cpp, f"llama_sampler_init_{name}")(*arguments)

    @classmethod
    def logit_bias(cls, vocabulary: int, bias: dict[int, float]) -> LlamaSampler:
        biases = (llama_cpp.llama_logit_bias * len(bias))(*bias.items())
        return cls("logit_bias", vocabulary, len(bias), biases)

    @classmethod
    def dry(
        cls, vocabulary: LlamaVocabulary, numbers: tuple[float, float, int, int], breakers: Sequence[str]
    ) -> LlamaSampler:
        """Create DRY with (multiplier, base, allowed length, last n). With breakers, this takes a second."""
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        return cls("dry", vocabulary.handle, *numbers, texts, len(breakers))

    def apply(
        self, ids: NDArray[np.integer[Any]], logits: NDArray[np.floating[Any]], *, is_sorted: bool = False
    ) -> Applied:
        """Apply the sampler to candidates. `is_sorted` must be true only if they are sorted by logit."""
        data = np.zeros(len(ids), _CANDIDATE)
        data["id"], data["logit"] = ids, logits
        first = data.ctypes.data
        array = llama_cpp.llama_token_data_array(
            ctypes.cast(first, llama_cpp.llama_token_data_p), len(ids), -1, is_sorted
        )
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        begin = (ctypes.cast(array.data, ctypes.c_void_p).value or 0) - first
        left = data[begin // _CANDIDATE.itemsize :][: array.size]
        selected = int(left["id"][array.selected]) if array.selected >= 0 else -1
        return Applied(left["id"].astype(np.int64), left["logit"].copy(), bool(array.sorted), selected)

    def accept(self, *tokens: int) -> None:
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._sampler, token)

    def reset(self) -> None:
        llama_cpp.llama_sampler_reset(self._sampler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_sampler_free(self._sampler)
