"""Compare our token ids with llama.cpp's for the same text. Used by the tests and by scripts/soak_tokenizers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmrun.tokenizers.base import Tokenizer
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import harsh_text, text_of_every_class


@dataclass(frozen=True)
class Mismatch:
    text: str
    add_special: bool
    parse_special: bool
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        asked = f"add_special={self.add_special}, parse_special={self.parse_special}"
        return f"{self.text!a} ({asked}): {self.ours}, llama.cpp {self.theirs}"


def compare(
    tokenizer: Tokenizer, oracle: LlamaVocabulary, text: str, *, add_special: bool, parse_special: bool
) -> Mismatch | None:
    """Return the mismatch between our ids and llama.cpp's, or None.

    For llama.cpp, surrogates are converted as in UTF-16: pairs are joined and lone ones become U+FFFD.
    """
    ours = tokenizer.encode(text, add_special=add_special, parse_special=parse_special).tolist()
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    theirs = oracle.encode(whole, add_special=add_special, parse_special=parse_special)
    if add_special and oracle.add_bos and theirs[:2] == [oracle.bos_id] * 2:
        theirs = theirs[1:]  # llama.cpp adds a BOS even if the text starts with one, and warns; we do not
    return None if ours == theirs else Mismatch(text, add_special, parse_special, ours, theirs)


def soak_texts(seed: int, first: int, count: int, special: Sequence[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, add_special, parse_special) of `count` cases, starting with `first`. Seed and number determine a
    case."""
    for case in range(first, first + count):
        source = random.Random(seed << 32 | case)
        text = text_of_every_class(source) if case % 8 == 7 else harsh_text(source, special)
        yield text, bool(case & 1), bool(case & 2)
