"""llama.cpp as an oracle for logits and a writer of model files, through llama-cpp-python's low-level API."""

from __future__ import annotations

import ctypes
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CONTEXT = 512  # tokens in the longest supported sequence

_GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_FLASH_OFF, _FLASH_ON = 0, 1


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """Discard the message, because llama.cpp logs every metadata key of every file."""


llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def requantize(source: Path, target: Path, weight_type: str) -> Path:
    """Write a copy of `source` with its matrices converted to `weight_type` by llama.cpp. Returns `target`.

    "F32" gives the dequantized model. For 4-bit types, llama.cpp keeps the token embedding at Q8_0, as it does when it
    quantizes original weights.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    names = (f"LLAMA_FTYPE_ALL_{weight_type}", f"LLAMA_FTYPE_MOSTLY_{weight_type}")
    parameters.ftype = next(getattr(llama_cpp, name) for name in names if hasattr(llama_cpp, name))
    parameters.allow_requantize = True
    parameters.nthread = 1
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp does not write {source} as {weight_type}")
    return target


class LlamaCppModel:
    """A model in llama.cpp on the CPU, for sequences of up to CONTEXT tokens and for two threads at a time.

    `kv_type` is the type of keys and values, or a pair such as "q8_0:q4_0".

    Each context computes on the calling thread. llama.cpp's own threads spin while they wait for each other; on a busy
    machine, two of them took ten times as long as one.
    """

    def __init__(self, path: Path, *, kv_type: str, flash_attention: bool) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocabulary_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts = [self._new_context(kv_type, flash_attention) for _ in range(2)]
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for context in self._contexts:
            self._idle.put(context)

    @classmethod
    def oracle(cls, dequantized: Path) -> Self:
        """Open a file of F32 weights with llama.cpp's most accurate settings: F32 keys and values, plain attention."""
        return cls(dequantized, kv_type="f32", flash_attention=False)

    def _new_context(self, kv_type: str, flash_attention: bool) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = 1
        keys, _, values = kv_type.partition(":")
        options.type_k, options.type_v = _GGML_TYPES[keys], _GGML_TYPES[values or keys]
        options.flash_attn_type = _FLASH_ON if flash_attention else _FLASH_OFF
        context = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context with a {kv_type} KV cache")
        return context

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return next-token logits at each position of the sequence, float32[len(tokens), vocabulary]. Starts from an
        empty cache."""
        context = self._idle.get()
        try:
            return self._decode(context, tokens)
        finally:
            self._idle.put(context)

    def _decode(self, context: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        status = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens: status {status}")
        rows = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(rows, shape=(len(tokens), self.vocabulary_size)).copy()

    def close(self) -> None:
        for context in self._contexts:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
