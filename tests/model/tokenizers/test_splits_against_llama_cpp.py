"""Tests that every pre-tokenizer splits where llama.cpp does.

In the test vocabulary any two bytes merge, so a split in another place changes the ids.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS, load_tokenizer
from llmrun.model.tokenizers.patterns import parse, sets_of
from tests.soak.tokenizer_soak import compare
from tests.support.gguf.gguf_files import NORMAL, Vocabulary, byte_characters, write_gguf
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import edge_characters, text_of_every_class

# One name for each distinct list of stages that spells tokens in bytes; test_registry covers all names.
KINDS = list({rule.stages: name for name, rule in reversed(PRE_TOKENIZERS.items()) if not rule.by_character}.values())


@cache
def sticky_vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (tokens, merges): all bytes, and every pair of the bytes of `edge_characters`, in random order."""
    spelled = byte_characters()
    bytes_ = sorted(set(edge_characters().encode()))
    pairs = list(itertools.product([spelled[byte] for byte in bytes_], repeat=2))
    random.Random(1).shuffle(pairs)
    return (*spelled, *("".join(pair) for pair in pairs)), tuple(" ".join(pair) for pair in pairs)


@pytest.mark.night
@pytest.mark.parametrize("name", KINDS)
def test_pieces_end_where_llama_cpp_s_do(name: str, tmp_path: Path) -> None:
    tokens, merges = sticky_vocabulary()
    vocabulary = Vocabulary(tokens, (NORMAL,) * len(tokens), merges, pre=name)
    metadata = {"general.architecture": "llama", **vocabulary.metadata(), "tokenizer.ggml.add_bos_token": False}
    path = write_gguf(tmp_path / "vocabulary.gguf", metadata, {})
    tokenizer, oracle = load_tokenizer(open_gguf(path)), LlamaVocabulary(path)
    source = random.Random(2)
    texts = [text_of_every_class(source) for _ in range(300)]
    for text in [*texts, *characters_at_edges(name)]:
        mismatch = compare(tokenizer, oracle, text, add_special=False, parse_special=False)
        assert mismatch is None, str(mismatch)


def characters_at_edges(name: str) -> list[str]:
    """Return texts with the characters at both ends of each set in the patterns, and their neighbors."""
    stages = PRE_TOKENIZERS[name].stages
    edges = np.unique(np.concatenate([one for stage in stages for one in sets_of(parse(stage.pattern))]))
    near = np.unique(np.concatenate([edges - 1, edges]))
    kept = [chr(code) for code in near.tolist() if 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000]
    return ["".join([f"a{c}b {c}{c} 1{c}!{c}中" for c in kept[at : at + 50]]) for at in range(0, len(kept), 50)]
