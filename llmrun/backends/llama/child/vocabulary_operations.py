"""The operations of a LlamaWorker on the model's vocabulary, used for tokenizers that llmrun does not implement."""

from __future__ import annotations

import ctypes
from typing import Any

from llmrun.backends.llama.child.deep_stack import call_with_stack

# llama.cpp splits most text with std::regex, which recurses for every character of a match and uses 326 bytes of stack
# per character. With an 8 MiB stack, a run of 25,000 dots crashes the process.
_STACK_OF_A_BYTE = 1024
_SHORT_TEXT = 4096


class VocabularyOperations:
    """Handles requests about tokens. Each `do_*` method handles one operation and returns the fields of its answer."""

    _llama: Any
    _model: Any

    def do_special_tokens(self) -> dict[str, Any]:
        """Return the special tokens, each as [id, text, attributes, whether it ends generation], and those with a role.

        "fill" has the tokens of `FillTokens` after the BOS. Missing tokens are -1."""
        llama, vocabulary = self._llama, self._llama.llama_model_get_vocab(self._model)
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN | llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        found = []
        for token in range(llama.llama_vocab_n_tokens(vocabulary)):
            attributes = llama.llama_vocab_get_attr(vocabulary, token)
            ends = llama.llama_vocab_is_eog(vocabulary, token)
            if attributes & special or ends:
                text = llama.llama_vocab_get_text(vocabulary, token).decode("latin-1")
                found.append([token, text, attributes, ends])
        return {
            "special": found,
            "bos": llama.llama_vocab_bos(vocabulary),
            "eos": llama.llama_vocab_eos(vocabulary),
            "add_bos": llama.llama_vocab_get_add_bos(vocabulary),
            "fill": [
                getattr(llama, f"llama_vocab_fim_{role}")(vocabulary) for role in ("pre", "suf", "mid", "rep", "sep")
            ],
        }

    def do_tokenize(self, text: str, add_special: bool, parse_special: bool) -> dict[str, Any]:
        data = text.encode()
        if len(data) <= _SHORT_TEXT:
            return {"tokens": self._tokens(data, add_special, parse_special)}
        stack = len(data) * _STACK_OF_A_BYTE
        return {"tokens": call_with_stack(stack, lambda: self._tokens(data, add_special, parse_special))}

    def _tokens(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(data) + 8
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        while True:
            tokens = (ctypes.c_int32 * room)()
            n = self._llama.llama_tokenize(vocabulary, data, len(data), tokens, room, add_special, parse_special)
            if n >= 0:
                return tokens[:n]
            room = -n

    def do_pieces(self, first: int, end: int) -> dict[str, Any]:
        """Return the bytes of tokens, decoded as Latin-1 so that they can be sent as JSON."""
        return {"pieces": [self._piece(token).decode("latin-1") for token in range(first, end)]}

    def _piece(self, token: int) -> bytes:
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        room = 64
        while True:
            piece = ctypes.create_string_buffer(room)
            n = self._llama.llama_token_to_piece(vocabulary, token, piece, room, 0, False)
            if n >= 0:
                return piece.raw[:n]
            room = -n
