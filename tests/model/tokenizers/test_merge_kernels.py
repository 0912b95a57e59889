"""Tests of the merge kernels against their plain Python twin, on vocabularies as odd as a file may contain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.formats.gguf.reader import open_gguf
from llmrun.kernels.tokens.bpe_merge import SHORT_PIECE, merge_by_priority
from llmrun.model.tokenizers.kinds import byte_characters, load_tokenizer
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.support.gguf import gguf_files
from tests.support.gguf.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, Vocabulary, write_gguf

pytestmark = pytest.mark.push

LETTERS = "abcd"
# Texts shorter and longer than SHORT_PIECE, of letters only, so that every pre-tokenizer keeps them in one piece.
texts = st.text(LETTERS, min_size=1, max_size=3 * SHORT_PIECE)
parts = st.text(LETTERS, min_size=1, max_size=3)


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    metadata = {"general.architecture": "llama", **vocabulary.metadata()}
    with TemporaryDirectory() as folder:
        return load_tokenizer(open_gguf(write_gguf(Path(folder) / "vocabulary.gguf", metadata, {})))


def byte_level(merges: Sequence[tuple[str, str]], *, complete: bool) -> Vocabulary:
    """Return a vocabulary of all bytes and the products of merges: all products if `complete`, else every other one."""
    products = list(dict.fromkeys(left + right for left, right in merges if len(left + right) > 1))
    tokens = ("<|end|>", *byte_characters(), *(products if complete else products[::2]))
    types = (CONTROL, *(NORMAL,) * (len(tokens) - 1))
    return Vocabulary(tokens, types, tuple(f"{left} {right}" for left, right in merges), pre="gpt-2", bos=0, eos=0)


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    return [tokenizer.token_bytes(id_).decode() for id_ in ids.tolist()]


@given(st.lists(st.tuples(parts, parts), min_size=1, max_size=30), st.lists(texts, min_size=1, max_size=5))
def test_byte_pairs_merge_by_rank(merges: list[tuple[str, str]], examples: list[str]) -> None:
    tokenizer = tokenizer_of(byte_level(merges, complete=True))
    ranks: dict[tuple[str, str], int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair, rank)
    for text in examples:
        assert spelled(tokenizer, text) == merge_by_priority(text, lambda left, right: ranks.get((left, right)))


@given(st.lists(st.tuples(parts, parts), min_size=1, max_size=30), texts)
def test_a_product_that_is_no_token_merges_on_and_is_written_in_bytes(merges: list[tuple[str, str]], text: str) -> None:
    vocabulary = byte_level(merges, complete=False)
    ranks: dict[tuple[str, str], int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair, rank)
    symbols = merge_by_priority(text, lambda left, right: ranks.get((left, right)))
    expected = [part for symbol in symbols for part in ([symbol] if symbol in vocabulary.tokens else symbol)]
    assert spelled(tokenizer_of(vocabulary), text) == expected


# With spaces: words are merged separately where no token has a space in such a place.
spaced_texts = st.text("ab ", min_size=1, max_size=3 * SHORT_PIECE)
spaced_parts = st.text("ab▁", min_size=1, max_size=4)


@given(
    st.dictionaries(spaced_parts, st.integers(-3, 3), min_size=1, max_size=30),
    st.lists(spaced_texts, min_size=1, max_size=5),
)
def test_sentence_pieces_merge_across_spaces_as_tokens_do(scores: dict[str, int], examples: list[str]) -> None:
    check_sentence_pieces(scores, examples)


@given(st.dictionaries(parts, st.integers(-3, 3), min_size=1, max_size=30), st.lists(texts, min_size=1, max_size=5))
def test_sentence_pieces_merge_by_score(scores: dict[str, int], examples: list[str]) -> None:
    check_sentence_pieces(scores, examples)


def check_sentence_pieces(scores: dict[str, int], examples: list[str]) -> None:
    """Check texts with few distinct scores, where the leftmost pair wins ties, and with letters that are not tokens."""
    bytes_ = tuple(f"<0x{byte:02X}>" for byte in range(256))
    tokens = ("<unk>", "<s>", "</s>", *bytes_, *scores)
    vocabulary = Vocabulary(
        tokens,
        (UNKNOWN, CONTROL, CONTROL, *(BYTE,) * 256, *(NORMAL,) * len(scores)),
        model="llama",
        scores=(*(0.0,) * 259, *map(float, scores.values())),
        bos=1,
        eos=2,
        unknown=0,
    )
    tokenizer = tokenizer_of(vocabulary)

    def priority(left: str, right: str) -> float | None:
        return -scores[left + right] if left + right in scores else None

    for text in examples:
        symbols = merge_by_priority("▁" + text.replace(" ", "▁"), priority)
        expected = [part for symbol in symbols for part in ([symbol] if symbol in scores else byte_tokens(symbol))]
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert [tokens[id_] for id_ in ids.tolist()] == expected


def byte_tokens(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def test_of_a_merge_listed_twice_the_first_counts() -> None:
    tokenizer = tokenizer_of(byte_level([("a", "b"), ("b", "c"), ("a", "b"), ("b", "a")], complete=True))
    assert spelled(tokenizer, "abc") == ["ab", "c"]
    assert spelled(tokenizer, "bab") == ["b", "ab"]


def test_plain_text_does_not_become_a_control_token_by_merging() -> None:
    vocabulary = byte_level([("a", "b"), ("ab", "c")], complete=True)
    forbidden = vocabulary.tokens.index("abc")
    types = tuple(CONTROL if i == forbidden else kind for i, kind in enumerate(vocabulary.types))
    tokenizer = tokenizer_of(Vocabulary(vocabulary.tokens, types, vocabulary.merges, pre="gpt-2", bos=0, eos=0))
    assert spelled(tokenizer, "abc") == ["a", "b", "c"]
    assert tokenizer.encode("abc", add_special=False, parse_special=True).tolist() == [forbidden]


def test_equal_scores_of_either_sign_of_zero_are_equal() -> None:
    base = gguf_files.tiny_spm_vocabulary()
    scores = np.array(base.scores, np.float32)
    scores[[base.tokens.index(text) for text in ("▁t", "he")]] = -0.0, 0.0
    vocabulary = Vocabulary(
        base.tokens, base.types, model="llama", scores=tuple(scores.tolist()), bos=1, eos=2, unknown=0
    )
    tokens = tokenizer_of(vocabulary).encode("the", add_special=False, parse_special=False).tolist()
    assert [base.tokens[id_] for id_ in tokens] == ["▁the"]


@pytest.mark.night
@pytest.mark.parametrize("letter", ["A", " ", "\n", "7", "!", "é"])
def test_a_mebibyte_of_one_character_is_encoded(letter: str) -> None:
    """With a quadratic merge, this would take hours."""
    text = letter * (1 << 20)
    for vocabulary in (gguf_files.tiny_vocabulary(), gguf_files.tiny_spm_vocabulary()):
        tokenizer = tokenizer_of(vocabulary)
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids.tolist()).decode() == text
