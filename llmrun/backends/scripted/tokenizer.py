"""The scripted backend's tokenizer. Its vocabulary has all bytes, a few control tokens, and made-up words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.tokenizers.fill_in_middle import fill_tokens, find_roles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.tokenizers.fill_in_middle import FillTokens

CONTROL_TOKENS = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, END_OF_TEXT, IM_START, IM_END = range(256, 256 + len(CONTROL_TOKENS))
FIRST_WORD = 256 + len(CONTROL_TOKENS)

_MARK = "\ufdd0"  # a Unicode noncharacter, which does not occur in normal text


class ScriptedTokenizer:
    """A tokenizer with a token for each byte.

    Ids 0 to 255 are the bytes. The control tokens follow, and made-up words (" w0", " w1", ...) fill the rest of the
    vocabulary. The model can generate these words, but `encode` never returns them.

    more_control_tokens  tokens to add after CONTROL_TOKENS, for tests of templates that use other control tokens
    """

    def __init__(self, vocabulary_size: int = FIRST_WORD, *, more_control_tokens: Sequence[str] = ()) -> None:
        self._controls = (*CONTROL_TOKENS, *more_control_tokens)
        self._first_word = 256 + len(self._controls)
        self._size = max(vocabulary_size, self._first_word)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control = re.compile("|".join(re.escape(token) for token in longest_first))

    @property
    def vocabulary_size(self) -> int:
        return self._size

    @property
    def bos_id(self) -> int | None:
        return BOS

    @property
    def eos_id(self) -> int | None:
        return IM_END

    @property
    def end_of_generation(self) -> frozenset[int]:
        return frozenset((END_OF_TEXT, IM_END))

    @property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens for filling in the middle, if `more_control_tokens` has them."""
        ids = {text: 256 + number for number, text in enumerate(self._controls)}
        return fill_tokens(find_roles(ids, {}), BOS)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        ids = self._split(text, str) if parse_special else list(_utf8(text))
        if add_special and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return np.array(ids, np.int32)

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        return self.encode(text, add_special=False, parse_special=False)

    def protect(self, text: str) -> str:
        doubled = text.replace(_MARK, _MARK * 2)
        return self._control.sub(lambda found: found[0][0] + _MARK + found[0][1:], doubled)

    def unprotect(self, text: str) -> str:
        return re.sub(f"{_MARK}({_MARK}?)", r"\1", text)

    def encode_rendered(self, text: str) -> NDArray[np.int32]:
        ids = self._split(text, self.unprotect)
        if ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return np.array(ids, np.int32)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"" if token_id < self._first_word else b" w%d" % (token_id - self._first_word)

    def all_token_bytes(self) -> list[bytes]:
        return list(map(self.token_bytes, range(self._size)))

    def token_text(self, token_id: int) -> str:
        if 256 <= token_id < self._first_word:
            return self._controls[token_id - 256]
        return self.token_bytes(token_id).decode("latin-1")

    def decode(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes(token) for token in ids)

    def _split(self, text: str, plain: Callable[[str], str]) -> list[int]:
        """Convert control strings to their tokens, and the text between them to bytes after passing it to `plain`."""
        ids: list[int] = []
        end = 0
        for found in self._control.finditer(text):
            ids += _utf8(plain(text[end : found.start()]))
            ids.append(256 + self._controls.index(found[0]))
            end = found.end()
        return ids + list(_utf8(plain(text[end:])))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # A lone surrogate, from an argument in another encoding, becomes "?".
