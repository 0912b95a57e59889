"""Tests of Unigram against llama.cpp and a plain Python twin, on vocabularies as odd as a file may contain."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import UnigramTokenizer, load_tokenizer
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.support.gguf.gguf_files import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, write_gguf
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import random_texts
from tests.support.tokenizers.vocabularies import UNIGRAM, our_tokenizer, vocabulary_path

pytestmark = pytest.mark.push

_SPECIAL = ("<pad>", "</s>", "<unk>")
_EOS, _UNKNOWN = 1, 2


def vocabulary_file(folder: Path, tokens: dict[str, float], kinds: tuple[int, ...] = (), **keys: object) -> Path:
    """Write a vocabulary. `kinds` are those of the first tokens; the others are normal."""
    types = (CONTROL, CONTROL, UNKNOWN, *kinds, *(NORMAL,) * (len(tokens) - len(kinds)))
    scores = (0.0, 0.0, 0.0, *tokens.values())
    vocabulary = Vocabulary((*_SPECIAL, *tokens), types, model="t5", scores=scores, bos=0, eos=_EOS, unknown=_UNKNOWN)
    metadata = {"general.architecture": "bert", **vocabulary.metadata()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return write_gguf(folder / "vocabulary.gguf", {k: v for k, v in metadata.items() if v is not None}, {})


def assert_same(ours: Tokenizer, oracle: LlamaVocabulary, text: str) -> None:
    for parse in (False, True):
        expected = oracle.encode(text, add_special=True, parse_special=parse)
        assert ours.encode(text, add_special=True, parse_special=parse).tolist() == expected, text


def best_division(text: str, tokens: dict[str, float]) -> list[int]:
    """Divide a text like the kernel, in plain Python."""
    ids = {token: len(_SPECIAL) + at for at, token in enumerate(tokens)}
    unknown = float(np.float32(min(tokens.values())) - np.float32(10))
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = []
        for start in range(end):
            total, division = best[start]
            part = text[start:end]
            if part in ids:
                ways.append((total + float(np.float32(tokens[part])), [*division, ids[part]]))
            elif end - start == 1:
                ways.append((total + unknown, division if division[-1:] == [_UNKNOWN] else [*division, _UNKNOWN]))
        best.append(max(ways, key=lambda way: way[0]))  # the first one with the largest sum, as in the kernel
    return best[-1][1]


pieces = st.text("abcé", min_size=1, max_size=9)


@given(st.dictionaries(pieces, st.floats(-9, -1, width=32), min_size=1, max_size=30), st.text("abcédf", max_size=40))
def test_texts_are_divided_into_the_likeliest_tokens(tokens: dict[str, float], text: str) -> None:
    with TemporaryDirectory() as folder:
        ours = load_tokenizer(open_gguf(vocabulary_file(Path(folder), tokens)))
        assert ours.encode(text, add_special=False, parse_special=False).tolist() == best_division(text, tokens)


@pytest.mark.parametrize("add_space_prefix", [True, False, None])
@pytest.mark.parametrize("remove_extra_whitespaces", [True, False, None])
def test_spaces_are_marked_as_the_file_says(
    add_space_prefix: bool | None, remove_extra_whitespaces: bool | None, tmp_path: Path
) -> None:
    tokens = dict.fromkeys(["▁", "a", "b", "▁a", "▁▁", "ab", "▁b", "é"], -1.0) | {"▁ab": -1.5}
    path = vocabulary_file(
        tmp_path, tokens, add_space_prefix=add_space_prefix, remove_extra_whitespaces=remove_extra_whitespaces
    )
    ours, oracle = load_tokenizer(open_gguf(path)), LlamaVocabulary(path)
    for text in ["", " ", "  ab  a ", "a\tb\n", "▁a", *random_texts(7, 200, ["</s>", "<unk>", " a", "é"])]:
        assert_same(ours, oracle, text)
        ids = ours.encode(text, add_special=False, parse_special=False).tolist()
        assert [ours.token_bytes(token) for token in ids] == [oracle.token_bytes(token) for token in ids]


def test_tokens_of_other_kinds_count_as_in_llama_cpp(tmp_path: Path) -> None:
    """User-defined tokens cost nothing, unused ones count as normal, and control tokens never stand for text."""
    tokens = {"xy": -50.0, "ab": -1.0, "bc": -0.5, "a": -2.0, "b": -2.0, "c": -2.0}
    path = vocabulary_file(tmp_path, tokens, kinds=(USER_DEFINED, UNUSED, CONTROL))
    ours, oracle = load_tokenizer(open_gguf(path)), LlamaVocabulary(path)
    for text in ["axyb", "abc", "bcbc", "xyxy", "xya bc", "a<unk>b"]:
        assert_same(ours, oracle, text)


@pytest.mark.parametrize("scores", [(-np.inf, -1.0), (-np.inf, -np.inf), (np.inf, -1.0), (-3.4e38, 3.4e38)])
def test_every_text_has_a_division_whatever_the_scores(scores: tuple[float, float], tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, dict(zip("ab", scores, strict=True)))
    ids = load_tokenizer(open_gguf(path)).encode("xa b" * 50, add_special=False, parse_special=False)
    assert {*ids.tolist()} <= {_UNKNOWN, 3, 4}
    assert len(ids) >= 1


@pytest.mark.parametrize("keys", [{"add_eos_token": False}, {"add_bos_token": True}, {"eos_token_id": None}])
def test_eos_is_added_unless_the_file_says_otherwise(keys: dict[str, Any], tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, {"a": -1.0}, **keys)
    assert_same(load_tokenizer(open_gguf(path)), LlamaVocabulary(path), "a")


@pytest.mark.parametrize("text", ["a", "<s>a", "  <s>a", "\u2581 <s>a"])
def test_a_bos_after_text_without_tokens_is_the_only_one(text: str) -> None:
    assert our_tokenizer(UNIGRAM[0]).encode(text, add_special=True, parse_special=True).tolist() == [0, 10, 2]


@cache
def real_tokenizer() -> UnigramTokenizer:
    found = load_tokenizer(open_gguf(vocabulary_path(UNIGRAM[0])))
    assert isinstance(found, UnigramTokenizer)
    return found


@given(st.data())
def test_damaged_tables_are_read_within_their_bounds(data: st.DataObject) -> None:
    """Any ids are right, because llama.cpp refuses the text, but no byte outside the table may be read."""
    nodes, texts = (part.copy() for part in our_tokenizer(UNIGRAM[0])._replacing)  # type: ignore[attr-defined]
    for _ in range(data.draw(st.integers(0, 40))):
        at = data.draw(st.integers(0, len(nodes) - 1))
        nodes[at : at + 64] = data.draw(st.integers(0, 2**32 - 1))
    nodes = nodes[: data.draw(st.one_of(st.just(len(nodes)), st.integers(0, len(nodes))))]
    texts = texts[-data.draw(st.integers(1, len(texts))) :]
    damaged = real_tokenizer()
    damaged._replacing = (nodes, texts)
    for text in random_texts(3, 5, ["ﷺ", "Ａ", "½"]):
        assert max(damaged.encode(text, add_special=False, parse_special=False), default=0) < damaged.vocabulary_size


@pytest.mark.parametrize(
    "table", [[4, 0, 0], [8, 0, 0, 0, 1, 0], [3, 0, 0, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0, 65]]
)
def test_tables_without_a_trie_and_texts_are_refused(table: list[int], tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, {"a": -1.0}, precompiled_charsmap=np.array(table, np.uint8))
    with pytest.raises(BadGGUF, match="texts with a NUL at the end"):
        load_tokenizer(open_gguf(path))
