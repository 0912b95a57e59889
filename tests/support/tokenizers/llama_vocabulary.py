"""llama.cpp's tokenizer, called through llama-cpp-python's low-level API. It is the oracle for ours."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from llmrun.model.tokenizers.vocabulary import FillTokens


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """Discard the message, because llama.cpp logs every metadata key of every file."""


llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


class LlamaVocabulary:
    """The vocabulary of a GGUF file, loaded by llama.cpp without the weights."""

    def __init__(self, path: Path) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._ids = (llama_cpp.llama_token * 1024)()
        self._text = ctypes.create_string_buffer(1024)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocabulary)
        self.bos_id: int = llama_cpp.llama_vocab_bos(self._vocabulary)
        self.eos_id: int = llama_cpp.llama_vocab_eos(self._vocabulary)
        self.add_bos: bool = llama_cpp.llama_vocab_get_add_bos(self._vocabulary)

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer to the vocabulary."""
        return self._vocabulary

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        encoded = text.encode()
        while True:
            n: int = llama_cpp.llama_tokenize(
                self._vocabulary, encoded, len(encoded), self._ids, len(self._ids), add_special, parse_special
            )
            if n >= 0:
                return list(self._ids[:n])
            self._ids = (llama_cpp.llama_token * -n)()

    def end_of_generation(self) -> frozenset[int]:
        is_ending = llama_cpp.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_ending(self._vocabulary, token))

    def fill_tokens(self) -> FillTokens | None:
        def found(role: str) -> int | None:
            id_: int = getattr(llama_cpp, f"llama_vocab_fim_{role}")(self._vocabulary)
            return id_ if id_ >= 0 else None

        bos = self.bos_id if self.add_bos and self.bos_id >= 0 else None
        prefix, suffix, middle = found("pre"), found("suf"), found("mid")
        if prefix is None or suffix is None or middle is None:
            return None
        return FillTokens(bos, prefix, suffix, middle, found("rep"), found("sep"))

    def token_bytes(self, token: int) -> bytes:
        n: int = llama_cpp.llama_token_to_piece(self._vocabulary, token, self._text, len(self._text), 0, False)
        assert n >= 0
        return self._text.raw[:n]
