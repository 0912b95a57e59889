"""Compares our token ids with llama.cpp's for random texts, in every supported vocabulary of llama.cpp's source."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmrun.tokenizers.base import Tokenizer
from tests.soak.driver import Broken, Case, Soak
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import harsh_text, text_of_every_class
from tests.support.tokenizers.vocabularies import ALL, added_texts, llama_vocabulary, our_tokenizer

_CORPUS = Path(__file__).resolve().parent.parent / "tokenizers" / "corpus.jsonl"


def tokenizers(soak: Soak) -> Iterator[Case]:
    """Encode a text per case. Texts that differ are added to the corpus; commit it together with the fix."""
    added_to = functools.cache(added_texts)

    def case(number: int) -> str:
        number, index = divmod(number, len(ALL))
        name = ALL[index]
        [(text, add, parse)] = soak_texts(soak.seed, number, 1, added_to(name))
        mismatch = compare(our_tokenizer(name), llama_vocabulary(name), text, add_special=add, parse_special=parse)
        if mismatch is None:
            return "equal"
        with _CORPUS.open("a") as corpus:
            fields = {key: value for key, value in asdict(mismatch).items() if key not in ("ours", "theirs")}
            corpus.write(json.dumps({"vocabulary": name, **fields}) + "\n")
        raise Broken(f"{name}: {mismatch}")

    yield case


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
