"""Converts DRY's sequence breakers from texts to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.tokenizers.base import Tokenizer

# llama.cpp's limits.
_LONGEST_TEXT = 40  # bytes
_LONGEST_TAIL = 20  # tokens

_NONE = np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Breakers:
    """The tokens of sequence breakers. A breaker is a single token, or a head followed by the tokens of its tail.

    heads   whether a token begins a breaker, bool[vocabulary]; empty if there are no breakers
    single  whether a token contains a whole breaker, bool[vocabulary]
    tails   head -> its tails
    """

    heads: NDArray[np.bool_]
    single: NDArray[np.bool_]
    tails: Mapping[int, Sequence[tuple[int, ...]]]

    def distance(self, latest_first: NDArray[np.intp]) -> int:
        """Return the number of tokens after the latest breaker, or the number of all tokens if there is none."""
        if not len(self.heads):
            return len(latest_first)
        for i in np.flatnonzero(self.heads[latest_first]).tolist():
            token = int(latest_first[i])
            before = tuple(latest_first[max(0, i - _LONGEST_TAIL) : i][::-1].tolist())
            matching = [len(tail) for tail in self.tails.get(token, ()) if before[: len(tail)] == tail]
            if matching or self.single[token]:
                return int(i) - max(matching, default=0)
        return len(latest_first)


NO_BREAKERS = Breakers(_NONE, _NONE, {})


def find_breakers(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
    """Return the tokens of the breakers in a vocabulary. Longer texts are cut off after 40 bytes.

    A token that contains a breaker is a whole breaker. If a token ends with the beginning of a breaker, the rest of the
    breaker is its tail.
    """
    if not texts:
        return NO_BREAKERS
    words = [_word(token, tokenizer) for token in range(tokenizer.vocabulary_size)]
    single = np.zeros(len(words), np.bool_)
    tails: dict[int, list[tuple[int, ...]]] = {}
    for breaker in [text.encode()[:_LONGEST_TEXT] for text in texts]:
        found = np.array([breaker in word for word in words])
        single |= found
        for n in range(1, len(breaker)):
            rest = breaker[n:].decode(errors="replace")
            tail = tuple(tokenizer.encode(rest, add_special=False, parse_special=False).tolist()[:_LONGEST_TAIL])
            for token in [token for token, word in enumerate(words) if word.endswith(breaker[:n]) and not found[token]]:
                tails.setdefault(token, []).append(tail)
    heads = single.copy()
    heads[list(tails)] = True
    return Breakers(heads, single, tails)


def _word(token: int, tokenizer: Tokenizer) -> bytes:
    """Return a token's text, even for control tokens, without the space that some tokenizers add to every text.

    For a few vocabularies, llama.cpp also removes the space before a punctuation mark here.
    """
    is_control = not tokenizer.token_bytes(token)
    return tokenizer.token_text(token).encode() if is_control else tokenizer.decode([token])
