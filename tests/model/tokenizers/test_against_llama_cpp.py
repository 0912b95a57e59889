"""Tests that our token ids equal llama.cpp's, on its own vectors and on random text, for every supported vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.vocabulary import fill_tokens_of
from tests.soak.tokenizer_soak import compare, soak_text
from tests.support.tokenizers.vocabularies import (
    ALL,
    SMOLLM2,
    UNIGRAM,
    WITH_VECTORS,
    WORD_PIECE,
    added_texts,
    llama_vocabulary,
    our_tokenizer,
    published_ids,
    vocabulary_path,
)

pytestmark = pytest.mark.push

RANDOM_TEXTS = 300  # per vocabulary; `scripts/soak tokenizers` runs any number
CORPUS = Path(__file__).with_name("corpus.jsonl")  # texts with past or suspected differences


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_llama_cpp_s_own_vectors(name: str) -> None:
    vectors = published_ids(name)
    assert len(vectors) == {"qwen35": 50}.get(name, 46)
    tokenizer = our_tokenizer(name)
    ours = [tokenizer.encode(text, add_special=False, parse_special=False).tolist() for text, _ in vectors]
    assert ours == [ids for _, ids in vectors]


@pytest.mark.night
@pytest.mark.parametrize("name", ALL)
def test_random_text_has_llama_cpp_s_ids(name: str) -> None:
    """Mixes whole and truncated added tokens, emoji sequences, broken UTF-8, white space and arbitrary characters."""
    tokenizer, oracle = our_tokenizer(name), llama_vocabulary(name)
    control = {token for token in range(tokenizer.vocabulary_size) if not tokenizer.token_bytes(token)}
    if name in (*WORD_PIECE, *UNIGRAM):
        control.remove(open_gguf(vocabulary_path(name)).integer("tokenizer.ggml.unknown_token_id"))
    added = added_texts(name)
    for case in range(RANDOM_TEXTS):
        text, add, parse = soak_text(1, case, added)
        mismatch = compare(tokenizer, oracle, text, add_special=add, parse_special=parse)
        assert mismatch is None, str(mismatch)
        if not parse:
            plain = tokenizer.encode(text, add_special=False, parse_special=False)
            assert control.isdisjoint(plain.tolist()), text


@pytest.mark.parametrize("case", [json.loads(line) for line in CORPUS.read_text().splitlines()], ids=str)
def test_a_text_that_was_hard_once_has_llama_cpp_s_ids(case: dict[str, str | bool]) -> None:
    name, text = str(case["vocabulary"]), str(case["text"])
    flags = {"add_special": bool(case["add_special"]), "parse_special": bool(case["parse_special"])}
    mismatch = compare(our_tokenizer(name), llama_vocabulary(name), text, **flags)
    assert mismatch is None, str(mismatch)


@pytest.mark.night
@pytest.mark.parametrize("name", ALL)
def test_long_pieces_have_llama_cpp_s_ids(name: str) -> None:
    """Covers pieces around the length from which a heap is used, and far longer ones."""
    tokenizer, oracle = our_tokenizer(name), llama_vocabulary(name)
    source = random.Random(2)
    for alphabet in ("ab", "aAB", "abcdefghijklmnopqrstuvwxyz", " ", " \n", "é€𝄞a", "!?=-", "0123456789", "▁ a"):
        for length in (22, 23, 24, 25, 26, 60, 400, 3000):
            text = "".join(source.choices(alphabet, k=length))
            ours = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
            assert ours == oracle.encode(text, add_special=False, parse_special=False), text


@pytest.mark.night
@pytest.mark.parametrize("name", ["gpt-neox", "llama-bpe", SMOLLM2, *WORD_PIECE, *UNIGRAM])
def test_every_character_is_of_the_class_llama_cpp_gives_it(name: str) -> None:
    """Covers all of planes 0 and 1 and samples beyond, each character next to letters, digits, spaces and itself."""
    tokenizer, oracle = our_tokenizer(name), llama_vocabulary(name)
    blocks = [*range(0, 0x20000, 256), *range(0x20000, 0x40000, 0x800), *range(0xE0000, 0x110000, 0x1000)]
    for first in blocks:
        if 0xD800 <= first < 0xE000:
            continue
        text = "".join([f"a{c} {c}1{c}{c}b!{c}" for c in map(chr, range(first, first + 256))])
        ours = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        assert ours == oracle.encode(text, add_special=False, parse_special=False), hex(first)


@pytest.mark.parametrize("name", ALL)
def test_the_same_tokens_have_a_purpose(name: str) -> None:
    tokenizer, oracle = our_tokenizer(name), llama_vocabulary(name)
    assert tokenizer.vocabulary_size == oracle.size
    assert tokenizer.end_of_generation == oracle.end_of_generation()
    assert tokenizer.fill_tokens == oracle.fill_tokens()
    in_header = fill_tokens_of(open_gguf(vocabulary_path(name)))
    assert in_header == (tokenizer.fill_tokens and replace(tokenizer.fill_tokens, bos=None))
    assert (tokenizer.bos_id, -1 if tokenizer.eos_id is None else tokenizer.eos_id) == (oracle.bos_id, oracle.eos_id)


# command-r has normal tokens not spelled in byte characters: llama.cpp returns "[UNK_BYTE_0x...", we return the text.
@pytest.mark.night
@pytest.mark.parametrize("name", [name for name in ALL if name != "command-r"])
def test_every_token_stands_for_the_same_bytes(name: str) -> None:
    tokenizer, oracle = our_tokenizer(name), llama_vocabulary(name)
    different = [id_ for id_ in range(oracle.size) if tokenizer.token_bytes(id_) != oracle.token_bytes(id_)]
    assert different == []


def test_a_token_that_is_not_spelled_in_bytes_is_shown_as_it_is() -> None:
    tokenizer = our_tokenizer("command-r")
    assert tokenizer.token_bytes(264) == "\u200d".encode()
