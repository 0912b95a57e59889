"""Tests of WordPiece against llama.cpp and a plain Python twin, on vocabularies as odd as a file may contain."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import load_tokenizer
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.support.gguf.gguf_files import CONTROL, NORMAL, UNKNOWN, Vocabulary, write_gguf
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import random_texts

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_UNKNOWN, _CLS, _SEP = 1, 2, 3


def vocabulary_file(folder: Path, tokens: tuple[str, ...], **keys: object) -> Path:
    types = (CONTROL, UNKNOWN, CONTROL, CONTROL, *(NORMAL,) * len(tokens))
    vocabulary = Vocabulary((*_SPECIAL, *tokens), types, model="bert", bos=_CLS, unknown=_UNKNOWN, padding=0)
    metadata = {"general.architecture": "bert", **vocabulary.metadata(), "tokenizer.ggml.seperator_token_id": _SEP}
    metadata |= {f"tokenizer.ggml.{key.replace('__', '.')}": value for key, value in keys.items()}
    return write_gguf(folder / "vocabulary.gguf", {k: v for k, v in metadata.items() if v is not None}, {})


def tokenizer_of(tokens: tuple[str, ...]) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return load_tokenizer(open_gguf(vocabulary_file(Path(folder), tokens)))


def longest_pieces(word: str, ids: dict[str, int]) -> list[int]:
    """Divide a word like the kernel, in plain Python."""
    rest, found = "▁" + word, []
    while rest:
        piece = next((rest[:n] for n in range(len(rest), 0, -1) if rest[:n] in ids), None)
        if piece is None:
            return [_UNKNOWN]
        found.append(ids[piece])
        rest = rest[len(piece) :]
    return found


pieces = st.tuples(st.sampled_from(["", "▁"]), st.text("abcé", min_size=1, max_size=4)).map("".join)


@pytest.mark.push
@given(
    st.lists(pieces, min_size=1, max_size=30, unique=True),
    st.lists(st.text("abcé", min_size=1, max_size=12), min_size=1, max_size=6),
)
def test_words_are_divided_into_the_longest_tokens(tokens: list[str], words: list[str]) -> None:
    tokenizer = tokenizer_of(tuple(tokens))
    ids = {token: len(_SPECIAL) + at for at, token in enumerate(tokens)}
    # Accents are stripped, so an é in a word is an e, which no token contains.
    expected = [id_ for word in words for id_ in longest_pieces(word.replace("é", "e"), ids)]
    assert tokenizer.encode(" ".join(words), add_special=False, parse_special=False).tolist() == expected


@pytest.mark.push
@pytest.mark.parametrize("lowercase", [True, False, None])
@pytest.mark.parametrize("strip_accents", [True, False, None])
def test_text_is_normalized_as_the_file_says(
    lowercase: bool | None, strip_accents: bool | None, tmp_path: Path
) -> None:
    letters = "aAeEéÉiIİzZ中.$€ñ"
    tokens = (*letters, *(f"▁{letter}" for letter in letters))
    path = vocabulary_file(tmp_path, tokens, normalizer__lowercase=lowercase, normalizer__strip_accents=strip_accents)
    ours, oracle = load_tokenizer(open_gguf(path)), LlamaVocabulary(path)
    for text in ["É e\u0301 İ ñ中a.$€", "[SEP]a[cls] ", *random_texts(7, 200, ["[SEP]", "[MASK]", "é", "中"])]:
        for parse in (False, True):
            expected = oracle.encode(text, add_special=True, parse_special=parse)
            assert ours.encode(text, add_special=True, parse_special=parse).tolist() == expected, text


@pytest.mark.push
@pytest.mark.parametrize("add_bos_token", [True, False])
def test_every_text_is_between_cls_and_sep(add_bos_token: bool, tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, ("▁a",), add_bos_token=add_bos_token)
    ours, oracle = load_tokenizer(open_gguf(path)), LlamaVocabulary(path)
    expected = oracle.encode("a", add_special=True, parse_special=False)
    assert ours.encode("a", add_special=True, parse_special=False).tolist() == expected == [_CLS, 4, _SEP]
    assert ours.decode(expected) == b"a"


@pytest.mark.parametrize("name", ["bos", "seperator", "unknown"])
def test_default_ids_outside_the_vocabulary_are_refused(name: str, tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, ("▁a",), **{f"{name}_token_id": None})
    with pytest.raises(BadGGUF, match=rf"{name}_token_id.*not among the 5 tokens"):
        open_gguf(path)
