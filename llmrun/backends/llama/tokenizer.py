"""A tokenizer that uses llama.cpp, for vocabularies that llmrun itself does not support, such as RWKV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.tokenizers.text_tokenizer import rendered_parts, without_surrogates
from llmrun.model.tokenizers.vocabulary import MARK, SpecialToken, SpecialTokens, checked_fill_tokens, unmark

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.llama.process import LlamaProcess

_UNKNOWN, _CONTROL, _USER_DEFINED, _STRIPS_RIGHT = 1 << 0, 1 << 3, 1 << 4, 1 << 8  # flags in enum llama_token_attr


class LlamaTokenizer:
    """A `tokenizers.base.Tokenizer` that sends its work to the llama.cpp process of the open model."""

    def __init__(self, process: LlamaProcess, vocabulary_size: int, *, space_prefix: bool) -> None:
        """Read the special tokens of the open model.

        space_prefix  whether the vocabulary adds a space before every text, which `decode` must remove again
        """
        self._process = process
        self._space_prefix = space_prefix
        self._pieces: dict[int, bytes] = {}
        self.vocabulary_size = vocabulary_size
        known = process.ask("special_tokens", "reading the vocabulary")
        self.bos_id = _inside(known["bos"], vocabulary_size)
        self.eos_id = _inside(known["eos"], vocabulary_size)
        self._add_bos = known["add_bos"] and self.bos_id is not None
        fill = [_inside(token, vocabulary_size) for token in known["fill"]]
        self.fill_tokens = checked_fill_tokens(self.bos_id if self._add_bos else None, *fill)
        self.end_of_generation = frozenset(token for token, _, _, ends in known["special"] if ends)
        silent = _CONTROL | _UNKNOWN
        self._control = {token: _text(text) for token, text, kind, _ in known["special"] if kind & silent}
        self._special = SpecialTokens(
            [
                SpecialToken(token, _text(text), not kind & _USER_DEFINED, bool(kind & _STRIPS_RIGHT))
                for token, text, kind, _ in known["special"]
                if kind & (_UNKNOWN | _CONTROL | _USER_DEFINED) and text and MARK not in _text(text)
            ]
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        ids = self._tokenize(without_surrogates(text), add_special=add_special, parse_special=parse_special)
        if add_special and self._add_bos and ids[:2] == [self.bos_id] * 2:
            del ids[0]
        return np.array(ids, np.int32)

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        ids = self._tokenize(without_surrogates(text), add_special=False, parse_special=False)
        starts_with_space = self._space_prefix and ids and self.token_bytes(ids[0]) == b" "
        return np.array(ids[1:] if starts_with_space and not text.startswith(" ") else ids, np.int32)

    def protect(self, text: str) -> str:
        return self._special.protect(without_surrogates(text))

    def unprotect(self, text: str) -> str:
        return unmark(text)[0]

    def encode_rendered(self, text: str | Sequence[str | int]) -> NDArray[np.int32]:
        ids: list[int] = []
        for part in rendered_parts(text, self._special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenize(part.decode(), add_special=False, parse_special=False)
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return np.array(ids, np.int32)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocabulary_size:
            raise ValueError(f"token id out of range: {token_id}, the vocabulary has {self.vocabulary_size}")
        known = self._pieces.get(token_id)
        if known is None:
            (known,) = self._pieces_of(token_id, token_id + 1)
            self._pieces[token_id] = known
        return known

    def all_token_bytes(self) -> list[bytes]:
        return self._pieces_of(0, self.vocabulary_size)

    def token_text(self, token_id: int) -> str:
        return self._control.get(token_id) or self.token_bytes(token_id).decode(errors="backslashreplace")

    def decode(self, ids: Sequence[int]) -> bytes:
        decoded = b"".join([self.token_bytes(int(token)) for token in ids])
        return decoded.removeprefix(b" ") if self._space_prefix else decoded

    def _pieces_of(self, first: int, end: int) -> list[bytes]:
        answer = self._process.ask("pieces", "reading the vocabulary", first=first, end=end)
        return [piece.encode("latin-1") for piece in answer["pieces"]]

    def _tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        answer = self._process.ask(
            "tokenize", "tokenizing a text", text=text, add_special=add_special, parse_special=parse_special
        )
        tokens: list[int] = answer["tokens"]
        return tokens


def _inside(token: int, vocabulary_size: int) -> int | None:
    return token if 0 <= token < vocabulary_size else None


def _text(latin_1: str) -> str:
    return latin_1.encode("latin-1").decode(errors="replace")
