"""Tests that converted tokenizers split text as Hugging Face's `tokenizers` does with the original tokenizer.json."""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.tokenizer import read_vocabulary, vocabulary_metadata
from tests.support.converting.checkpoints import (
    BYTE_LEVEL,
    DIGITS_APART,
    PIECES,
    byte_level_tokenizer,
    changed,
    sentencepiece_tokenizer,
    sentencepiece_vocabulary,
    tiny_checkpoint,
)
from tests.support.gguf.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    byte_characters,
    tiny_spm_vocabulary,
    tiny_vocabulary,
    write_gguf,
)
from tests.support.tiers import examples
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import random_texts

_BYTES = BYTE_LEVEL | {"use_regex": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def splits(*patterns: str, digits: bool = False, **how: Any) -> dict[str, Any]:
    """Return a pre-tokenizer that splits by patterns and maps bytes to characters."""
    flags = {"behavior": "Isolated", "invert": False} | how
    steps: list[dict[str, Any]] = [{"type": "Split", "pattern": {"Regex": each}, **flags} for each in patterns]
    steps += [{"type": "Digits", "individual_digits": True}] if digits else []
    return {"type": "Sequence", "pretokenizers": [*steps, _BYTES]}


# The pre-tokenizers of published models, each with its `ignore_merges` and its name in GGUF files.
PUBLISHED: list[tuple[str, dict[str, Any], bool]] = [
    ("gpt-2", BYTE_LEVEL, False),
    ("smollm", DIGITS_APART, False),
    ("qwen2", splits(_WORDS.replace("{1,3}", "")), False),
    ("llama-bpe", splits(_WORDS), True),
    ("smaug-bpe", splits(_WORDS, behavior="Removed", invert=True), False),
    ("tekken", splits(_TEKKEN), True),
    ("deepseek-coder", splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", digits=True), False),
]


def metadata(folder: Path, tokenizer: dict[str, Any], size: int | None = None) -> dict[str, NewValue]:
    """Convert a tokenizer.json. `size` is the number of rows of the embedding."""
    checkpoint = tiny_checkpoint()
    checkpoint.tokenizer = tokenizer
    n_tokens = 1 + max(tokenizer["model"]["vocab"].values(), default=0)
    with Checkpoint(checkpoint.write(Path(mkdtemp(dir=folder)) / "model")) as opened:
        return vocabulary_metadata(read_vocabulary(opened, n_tokens if size is None else size))


def oracle(folder: Path, found: dict[str, NewValue]) -> LlamaVocabulary:
    """Load a converted tokenizer in llama.cpp."""
    keys = {"general.architecture": "llama", **found, "tokenizer.ggml.add_bos_token": False}
    return LlamaVocabulary(write_gguf(folder / "vocabulary.gguf", keys, {}))


def sticky_vocabulary() -> Vocabulary:
    """Return all bytes, and all pairs of the bytes of some characters, so that a split elsewhere changes the IDs."""
    spelled = byte_characters()
    bytes_ = sorted(set("aZé中 \n\r\t/.'s12½!_-".encode()))
    pairs = list(itertools.product([spelled[byte] for byte in bytes_], repeat=2))
    random.Random(1).shuffle(pairs)
    tokens = (*spelled, *("".join(pair) for pair in pairs))
    return Vocabulary(tokens, (NORMAL,) * len(tokens), tuple(" ".join(pair) for pair in pairs))


def is_settled(text: str) -> bool:
    """Report whether the libraries agree about the text by design.

    They know different versions of Unicode, and a case-insensitive pattern treats U+017F as an s.
    """
    return "ſ" not in text and all(unicodedata.ucd_3_2_0.category(character) != "Cn" for character in text)


@pytest.mark.push
@pytest.mark.parametrize(("name", "pre_tokenizer", "whole"), PUBLISHED, ids=[name for name, _, _ in PUBLISHED])
def test_published_pre_tokenizers_split_as_before(
    name: str, pre_tokenizer: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer(sticky_vocabulary(), pre_tokenizer)
    tokenizer["model"]["ignore_merges"] = whole
    found = metadata(tmp_path, tokenizer)
    assert found["tokenizer.ggml.pre"] == name
    theirs, ours = Tokenizer.from_str(json.dumps(tokenizer)), oracle(tmp_path, found)
    source = random.Random(3)
    letters = "aZ中" if name == "tekken" else "aZé中"  # llama.cpp's tekken knows the case of ASCII letters only
    texts = ["".join(source.choices(f"{letters} \n\r\t/.'s12½!_-", k=source.randrange(12))) for _ in range(2000)]
    texts += [text for text in random_texts(4, 1000) if is_settled(text) and text.isascii()]
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=False) == expected, repr(text)


@pytest.mark.parametrize(
    ("pre_tokenizer", "whole", "named"),
    [
        (splits(_WORDS.replace("{1,3}", "+")), False, "is unknown"),
        (splits(_TEKKEN), False, "without ignore_merges"),
        (BYTE_LEVEL, True, "with ignore_merges"),
        (BYTE_LEVEL | {"add_prefix_space": True}, False, "<ByteLevel>"),
        (splits(_WORDS, behavior="MergedWithNext"), True, "<Split>"),
        ({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, BYTE_LEVEL]}, False, "<Punctuation>"),
        (
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, _BYTES]},
            False,
            "<Dig",
        ),
    ],
)
def test_unknown_pre_tokenizers_are_refused(
    pre_tokenizer: dict[str, Any], whole: bool, named: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer(tiny_vocabulary(), pre_tokenizer)
    tokenizer["model"]["ignore_merges"] = whole
    with pytest.raises(UnsupportedModel) as caught:
        metadata(tmp_path, tokenizer)
    assert "pre_tokenizer is unknown" in str(caught.value)
    assert named in str(caught.value)


def test_byte_level_vocabularies_are_kept(tmp_path: Path) -> None:
    vocabulary = tiny_vocabulary()
    found = metadata(tmp_path, byte_level_tokenizer(vocabulary), size=len(vocabulary.tokens) + 2)
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.tokens"] == [
        *vocabulary.tokens,
        *(f"[PAD{len(vocabulary.tokens) + index}]" for index in range(2)),
    ]
    assert np.array_equal(found["tokenizer.ggml.token_type"], [*vocabulary.types, UNUSED, UNUSED])
    assert found["tokenizer.ggml.merges"] == list(vocabulary.merges)


def test_merges_may_be_strings(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tiny_vocabulary())
    tokenizer["model"]["merges"] = list(tiny_vocabulary().merges)
    assert metadata(tmp_path, tokenizer)["tokenizer.ggml.merges"] == list(tiny_vocabulary().merges)


def test_added_tokens_have_their_types(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tiny_vocabulary())
    for index, (content, special) in enumerate([("<tool_call>", False), ("<|box|>", False), ("<eot>", True)]):
        tokenizer["added_tokens"].append({"id": 302 + index, "content": content, "special": special})
    found = metadata(tmp_path, tokenizer, size=305)
    assert found["tokenizer.ggml.tokens"][302:] == ["<tool_call>", "<|box|>", "<eot>"]  # type: ignore[index]
    assert list(found["tokenizer.ggml.token_type"][302:]) == [USER_DEFINED, CONTROL, CONTROL]  # type: ignore[index]


def test_sentencepiece_scores_are_recovered(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(PIECES)
    found = metadata(tmp_path, sentencepiece_tokenizer(vocabulary))
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"] == list(vocabulary.tokens)
    kinds = found["tokenizer.ggml.token_type"]
    assert np.array_equal(kinds, vocabulary.types)
    assert [kinds[index] for index in (0, 1, 3)] == [UNKNOWN, CONTROL, BYTE]  # type: ignore[index]
    assert "tokenizer.ggml.merges" not in found
    assert found["tokenizer.ggml.add_space_prefix"] is True
    scores = dict(zip(vocabulary.tokens, found["tokenizer.ggml.scores"], strict=True))  # type: ignore[arg-type]
    assert sorted(PIECES, key=scores.__getitem__, reverse=True) == list(PIECES)
    assert all(scores[character] < min(scores[piece] for piece in PIECES) for character in "▁thewor")


def test_pairs_of_the_best_token_may_be_missing(tmp_path: Path) -> None:
    """Old versions of transformers left them out, for Llama 2 and Mistral 7B."""
    vocabulary = sentencepiece_vocabulary(["▁▁", *(piece for piece in PIECES if piece != "▁▁")])
    tokenizer = sentencepiece_tokenizer(vocabulary)
    whole = metadata(tmp_path, tokenizer)
    merges = tokenizer["model"]["merges"]
    assert merges[0] == ["▁", "▁"]
    found = metadata(tmp_path, changed(tokenizer, ("model", "merges"), merges[1:]))
    before, after = (np.argsort(np.asarray(each["tokenizer.ggml.scores"])) for each in (whole, found))
    assert (before == after).all()
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece vocabulary"):
        metadata(tmp_path, changed(tokenizer, ("model", "merges"), merges[2:]))


def has_border(text: str) -> bool:
    """Report whether a text begins with one of its own ends, so that it can overlap with itself."""
    return any(text[:size] == text[-size:] for size in range(1, len(text)))


@pytest.mark.push
@settings(deadline=None, max_examples=examples(60))
@given(
    words=st.lists(
        st.text("abc▁", min_size=2, max_size=5).filter(lambda word: not has_border(word)), unique=True, min_size=1
    ),
    texts=st.lists(st.text("abcé ", min_size=1, max_size=30), min_size=1, max_size=20),
)
def test_sentencepiece_splits_as_before(
    words: list[str], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """If a token can overlap with itself, transformers and SentencePiece may merge different occurrences first."""
    tokenizer = sentencepiece_tokenizer(sentencepiece_vocabulary([*words, "ab"]))
    folder = tmp_path_factory.mktemp("spm")
    theirs, ours = Tokenizer.from_str(json.dumps(tokenizer)), oracle(folder, metadata(folder, tokenizer))
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=False) == expected, repr(text)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (None, METASPACE, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, None, False),
    ],
)
def test_newer_forms_of_sentencepiece_are_known(
    normalizer: Any, pre_tokenizer: Any, prefix: bool, tmp_path: Path
) -> None:
    tokenizer = sentencepiece_tokenizer() | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    found = metadata(tmp_path, tokenizer)
    assert found["tokenizer.ggml.add_space_prefix"] is prefix
    theirs, ours = Tokenizer.from_str(json.dumps(tokenizer)), oracle(tmp_path, found)
    for text in ("Hello the world", "the  world  ", "x<y>"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=False) == expected


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("model", "type"), "Unigram", "model.type is 'Unigram', but only BPE"),
        (("model", "byte_fallback"), False, "neither byte-level BPE nor SentencePiece with byte fallback"),
        (("model", "dropout"), 0.1, "model.dropout cannot be converted"),
        (("model", "end_of_word_suffix"), "</w>", "model.end_of_word_suffix cannot be converted"),
        (("normalizer",), None, "normalizer is unknown (missing)"),
        (("normalizer",), {"type": "Precompiled"}, "normalizer is unknown (<Precompiled>)"),
        (("pre_tokenizer",), METASPACE | {"split": True}, "<Metaspace>"),
    ],
)
def test_other_tokenizers_are_refused_by_name(keys: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        metadata(tmp_path, changed(sentencepiece_tokenizer(), keys, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "merges",
    [
        [["b", "c"], ["a", "bc"], ["a", "b"], ["ab", "c"]],  # the pairs of abc are not together
        [["b", "c"], ["a", "bc"], ["a", "b"]],  # a pair of abc is missing
    ],
)
def test_other_merges_are_not_sentencepiece(merges: list[list[str]], tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(sentencepiece_vocabulary(["bc", "ab", "abc"]))
    metadata(tmp_path, tokenizer)
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece vocabulary"):
        metadata(tmp_path, changed(tokenizer, ("model", "merges"), merges))


def test_long_sentencepiece_tokens_are_refused(tmp_path: Path) -> None:
    """The pairs of a token of 100,000 characters would take 10 GB."""
    longest = sentencepiece_tokenizer(sentencepiece_vocabulary(["ab", "a" * 1024]))
    assert metadata(tmp_path, longest)
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece vocabulary"):
        metadata(tmp_path, sentencepiece_tokenizer(sentencepiece_vocabulary(["ab", "a" * 1025])))


def test_characters_of_sentencepiece_tokens_are_tokens(tmp_path: Path) -> None:
    """llama.cpp merges characters that are not tokens, too."""
    tokenizer = sentencepiece_tokenizer(tiny_spm_vocabulary())
    with pytest.raises(UnsupportedModel, match="not those of a SentencePiece vocabulary"):
        metadata(tmp_path, tokenizer)


def test_byte_level_normalizers_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tiny_vocabulary()) | {"normalizer": {"type": "NFC"}}
    metadata(tmp_path, tokenizer)
    with pytest.raises(UnsupportedModel, match="'Lowercase', but only NFC"):
        metadata(tmp_path, tokenizer | {"normalizer": {"type": "Lowercase"}})


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("model", "merges"), [], "merges is empty"),
        (("model", "merges"), ["a b c"], "element 0 must have two parts"),
        (("model", "merges"), [["a", 5]], "element 0 must have two parts"),
        (("model", "merges"), [["a", "!!"]], "'a' and '!!', does not form a token"),
        (("model", "vocab", "a"), 4, "has the same ID as"),
        (("model", "vocab", "a"), 10**6, "has the ID 1000000, but the model has only"),
        (("model", "vocab", "a"), -1, "must be an integer of 0 to"),
        (("model", "vocab", "a\0"), 302, "which contains a NUL"),
        (("added_tokens",), [{"id": 302, "content": "a"}], "has two tokens, 100 and 302, with the text 'a'"),
        (("added_tokens",), ["a"], "element 0 must be an object"),
        (("model",), [], "model must be an object"),
    ],
)
def test_broken_tokenizers_are_refused(keys: tuple[str, ...], value: Any, message: str, tmp_path: Path) -> None:
    tokenizer = changed(byte_level_tokenizer(tiny_vocabulary()), keys, value)
    checkpoint = tiny_checkpoint()
    checkpoint.tokenizer = tokenizer
    with Checkpoint(checkpoint.write(tmp_path / "model")) as opened, pytest.raises(ModelFileError) as caught:
        vocabulary_metadata(read_vocabulary(opened, 303))
    assert message in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint().write(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with Checkpoint(folder) as opened, pytest.raises(UnsupportedModel, match=r"there is no tokenizer\.json"):
        read_vocabulary(opened, 302)
