"""llama.cpp as an oracle for logits and a writer of model files, through llama-cpp-python's low-level API."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import llama_cpp
import numpy as np

from llmrun.base.types import IMAGE_ROW, Pooling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from llmrun.base.types import Batch

CONTEXT = 512  # tokens in the longest supported sequence

_GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_FLASH_OFF, _FLASH_ON = 0, 1


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """Discard the message, because llama.cpp logs every metadata key of every file."""


llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def requantize(source: Path, target: Path, weight_type: str, **fields: Any) -> Path:
    """Write a copy of `source` with its matrices converted to `weight_type` by llama.cpp. Returns `target`.

    "F32" gives the dequantized model. For 4-bit types, llama.cpp keeps the token embedding at Q8_0, as it does when it
    quantizes original weights. `fields` are those of llama_model_quantize_params.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    names = (f"LLAMA_FTYPE_ALL_{weight_type}", f"LLAMA_FTYPE_MOSTLY_{weight_type}")
    parameters.ftype = next(getattr(llama_cpp, name) for name in names if hasattr(llama_cpp, name))
    parameters.allow_requantize = True
    parameters.nthread = 1
    for name, value in fields.items():
        setattr(parameters, name, value)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp does not write {source} as {weight_type}")
    return target


class LlamaCppModel:
    """A model in llama.cpp on the CPU, for sequences of up to CONTEXT tokens and for two threads at a time.

    `kv_type` is the type of keys and values, or a pair such as "q8_0:q4_0".

    Each context computes on the calling thread. llama.cpp's own threads spin while they wait for each other; on a busy
    machine, two of them took ten times as long as one.
    """

    def __init__(self, path: Path, *, kv_type: str, flash_attention: bool, draft_head: bool = False) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.load_mtp = draft_head
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.hidden_size: int = llama_cpp.llama_model_n_embd_out(self._model)
        self.vocabulary_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        kind = llama_cpp.LLAMA_CONTEXT_TYPE_MTP if draft_head else llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT
        self._contexts = [self._new_context(kv_type, flash_attention, kind) for _ in range(2)]
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for context in self._contexts:
            self._idle.put(context)

    @classmethod
    def oracle(cls, dequantized: Path) -> Self:
        """Open a file of F32 weights with llama.cpp's most accurate settings: F32 keys and values, plain attention."""
        return cls(dequantized, kv_type="f32", flash_attention=False)

    @classmethod
    def head_oracle(cls, dequantized: Path) -> Self:
        """Open the draft head of a file of F32 weights, with the same settings as `oracle`."""
        return cls(dequantized, kv_type="f32", flash_attention=False, draft_head=True)

    def _new_context(self, kv_type: str, flash_attention: bool, kind: int) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.ctx_type = kind
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_NONE
        options.n_threads = options.n_threads_batch = 1
        keys, _, values = kv_type.partition(":")
        options.type_k, options.type_v = _GGML_TYPES[keys], _GGML_TYPES[values or keys]
        options.flash_attn_type = _FLASH_ON if flash_attention else _FLASH_OFF
        context = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context with a {kv_type} KV cache")
        return context

    def logits(self, tokens: Sequence[int], given: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return next-token logits at each position of the sequence, float32[len(tokens), vocabulary]. Starts from an
        empty cache.

        given  float32[len(tokens), hidden size], the hidden states that a draft head takes
        """
        with self._context() as context:
            self._decode(context, tokens, given)
            rows = llama_cpp.llama_get_logits(context)
            return np.ctypeslib.as_array(rows, shape=(len(tokens), self.vocabulary_size)).copy()

    def logits_of_batch(self, batch: Batch) -> NDArray[np.float32]:
        """Return logits at each row of a prompt with images, float32[rows, vocabulary]. Starts from an empty cache.

        llama.cpp decodes tokens and embeddings separately, and an image whose rows attend to later rows by itself.
        """
        found, used = [], 0
        with self._context() as context:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            for rows in _parts_of(batch):
                count, embeds = rows.stop - rows.start, None
                if batch.tokens[rows.start] == IMAGE_ROW:
                    assert batch.embeds is not None
                    embeds = batch.embeds[used : used + count]
                    used += count
                llama_cpp.llama_set_causal_attn(context, embeds is None or batch.ahead is None)
                _decode_rows(context, batch, rows, embeds)
                logits = llama_cpp.llama_get_logits(context)
                found.append(np.ctypeslib.as_array(logits, shape=(count, self.vocabulary_size)).copy())
            llama_cpp.llama_set_causal_attn(context, True)
        return np.concatenate(found)

    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the hidden states at each position of the sequence, float32[len(tokens), hidden size]. Starts from an
        empty cache."""
        with self._context() as context:
            llama_cpp.llama_set_embeddings(context, True)
            self._decode(context, tokens)
            rows = llama_cpp.llama_get_embeddings(context)
            found = np.ctypeslib.as_array(rows, shape=(len(tokens), self.hidden_size)).copy()
            llama_cpp.llama_set_embeddings(context, False)
            return found

    def pooled(self, tokens: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
        """Return the sequence's vector, float32[1, hidden size], or its scores with RANK, float32[1, labels].

        NONE returns the hidden states at each position. Models without a KV cache need this method.
        """
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = _GGML_TYPES["f32"]
        options.flash_attn_type, options.embeddings, options.pooling_type = _FLASH_OFF, True, int(pooling)
        context = llama_cpp.llama_init_from_model(self._model, options)
        try:
            self._decode(context, tokens)
            if pooling is Pooling.NONE:
                shape, found = (len(tokens), self.hidden_size), llama_cpp.llama_get_embeddings(context)
            else:
                labels = llama_cpp.llama_model_n_cls_out(self._model)
                shape = (1, labels if pooling is Pooling.RANK else self.hidden_size)
                found = llama_cpp.llama_get_embeddings_seq(context, 0)
            return np.ctypeslib.as_array(found, shape=shape).copy()
        finally:
            llama_cpp.llama_free(context)

    @contextmanager
    def _context(self) -> Iterator[Any]:
        """Lend an idle context."""
        context = self._idle.get()
        try:
            yield context
        finally:
            self._idle.put(context)

    def _decode(self, context: Any, tokens: Sequence[int], given: NDArray[np.float32] | None = None) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = True
        states = None if given is None else np.ascontiguousarray(given, np.float32)
        if states is not None:
            batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        run = llama_cpp.llama_encode if llama_cpp.llama_model_has_encoder(self._model) else llama_cpp.llama_decode
        status = run(context, batch)
        batch.embd = None
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens: status {status}")

    def close(self) -> None:
        for context in self._contexts:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts_of(batch: Batch) -> Iterator[slice]:
    """Yield the rows that llama.cpp decodes together: texts, images, and each image with a two-way mask."""
    is_image = batch.tokens == IMAGE_ROW
    ends = is_image[1:] != is_image[:-1]
    if batch.ahead is not None:
        ends |= is_image[:-1] & (batch.ahead[:-1] == 0)
    borders = [0, *(np.flatnonzero(ends) + 1).tolist(), len(is_image)]
    yield from itertools.starmap(slice, itertools.pairwise(borders))


def _decode_rows(context: Any, batch: Batch, rows: slice, embeds: NDArray[np.float32] | None) -> None:
    """Decode rows of a batch, all of which get logits."""
    count, integers = rows.stop - rows.start, ctypes.POINTER(ctypes.c_int32)
    positions = np.zeros((4, count), np.int32)  # with M-RoPE, images have four, of which the last is always 0
    positions[:3] = batch.pos[rows] if batch.rope_pos is None else batch.rope_pos[rows].T
    decoded, sequence = llama_cpp.llama_batch(count), (ctypes.c_int32 * 1)(0)
    if embeds is None:
        tokens = np.ascontiguousarray(batch.tokens[rows])
        decoded.token = tokens.ctypes.data_as(integers)
    else:
        embeds = np.ascontiguousarray(embeds)
        decoded.embd = embeds.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    decoded.pos = positions.ctypes.data_as(integers)
    decoded.n_seq_id = (ctypes.c_int32 * count)(*[1] * count)
    decoded.seq_id = (integers * count)(*[ctypes.cast(sequence, integers)] * count)
    decoded.logits = (ctypes.c_int8 * count)(*[1] * count)
    status = llama_cpp.llama_decode(context, decoded)
    if status != 0:
        raise RuntimeError(f"llama_decode of {count} rows: status {status}")
