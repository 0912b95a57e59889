"""Compares our token ids with llama.cpp's for random texts, in every supported vocabulary of llama.cpp's source."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.soak.driver import Broken, Case, Soak
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import harsh_text, text_of_every_class
from tests.support.tokenizers.vocabularies import ALL, added_texts, llama_vocabulary, our_tokenizer

_CORPUS = Path(__file__).resolve().parent.parent / "model" / "tokenizers" / "corpus.jsonl"


def tokenizers(soak: Soak) -> Iterator[Case]:
    """Encode a text per case. Texts whose ids differ are added to the corpus; commit it together with the fix."""
    added_to = functools.cache(added_texts)

    def case(number: int) -> str:
        number, index = divmod(number, len(ALL))
        name = ALL[index]
        text, add, parse = soak_text(soak.seed, number, added_to(name))
        difference = compare(our_tokenizer(name), llama_vocabulary(name), text, add_special=add, parse_special=parse)
        if difference is None:
            return "equal"
        with _CORPUS.open("a") as corpus:
            fields = {"vocabulary": name, "text": text, "add_special": add, "parse_special": parse}
            corpus.write(json.dumps(fields) + "\n")
        raise Broken(f"{name}: {difference}")

    yield case


def compare(
    tokenizer: Tokenizer, oracle: LlamaVocabulary, text: str, *, add_special: bool, parse_special: bool
) -> str | None:
    """Return the difference between our ids and llama.cpp's in words, or None.

    For llama.cpp, surrogates are converted as in UTF-16: pairs are joined and lone ones become U+FFFD.
    """
    ours = tokenizer.encode(text, add_special=add_special, parse_special=parse_special).tolist()
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    theirs = oracle.encode(whole, add_special=add_special, parse_special=parse_special)
    if add_special and oracle.add_bos and theirs[:2] == [oracle.bos_id] * 2:
        theirs = theirs[1:]  # llama.cpp adds a BOS even if the text starts with one, and warns; we do not
    return None if ours == theirs else f"{text!a} ({add_special=}, {parse_special=}): {ours}, llama.cpp {theirs}"


def soak_text(seed: int, case: int, special: Sequence[str]) -> tuple[str, bool, bool]:
    """Return (text, add_special, parse_special) of a case."""
    source = random.Random(seed << 32 | case)
    text = text_of_every_class(source) if case % 8 == 7 else harsh_text(source, special)
    return text, bool(case & 1), bool(case & 2)
