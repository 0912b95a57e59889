"""The WordPiece tokenizer of BERT models, `bert` in GGUF files.

Text is cleaned, divided into words and punctuation, and usually converted to lower case without accents, so decoding
cannot restore the original text. In a GGUF vocabulary, tokens that begin a word begin with U+2581.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import NOT_FOUND
from llmrun.model.tokenizers.patterns import contains, named, union
from llmrun.model.tokenizers.text_tokenizer import SPACE, Parts, TextTokenizer
from llmrun.model.tokenizers.vocabulary import Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.patterns import CodePoints

# llama.cpp's defaults if the file does not specify these tokens: [UNK], [CLS] and [SEP] of bert-base-uncased.
_UNKNOWN_ID, _CLS_ID, _SEP_ID = 100, 101, 102

_REPLACEMENT = "\ufffd"  # replaces invalid UTF-8


def load_wordpiece(file: GGUFFile) -> WordPieceTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `bert`."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=_CLS_ID, eos_id=None, add_bos=True), merged=False)
    lowercase = file.boolean("tokenizer.ggml.normalizer.lowercase", True)
    return WordPieceTokenizer(
        # llama.cpp always adds [CLS] and [SEP], even if the file specifies otherwise.
        replace(vocabulary, add_bos=True),
        unknown_id=file.integer("tokenizer.ggml.unknown_token_id", _UNKNOWN_ID),
        sep_id=file.integer("tokenizer.ggml.seperator_token_id", _SEP_ID),
        words=Words(
            lowercase=lowercase, strip_accents=file.boolean("tokenizer.ggml.normalizer.strip_accents", lowercase)
        ),
    )


class Words(dict[int, str]):
    """A table for `str.translate` that normalizes the characters of a text and inserts spaces between words.

    Characters are looked up on demand, because a table of all of Unicode would take too long to build. Characters that
    Unicode 15.1 does not assign are never changed, so that ids do not depend on the interpreter's Unicode version.
    """

    def __init__(self, *, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents
        self._changing = union(*map(named, "LNPMS"))
        self._dropped = union(named("C"), *([named("M")] if strip_accents else []))
        self._alone = union(named("P"), named("ASCII symbols"), named("Ideographs of BERT"))

    def __missing__(self, code_point: int) -> str:
        self[code_point] = text = self._normalized(chr(code_point))
        return text

    def _normalized(self, character: str) -> str:
        """Return the replacement of a character: a space, nothing, or the character (with spaces if it is a word)."""
        if self._strip_accents and _contains(self._changing, character):
            character = normalize("NFD", character)[0]
        if _contains(named("s"), character):
            return " "
        if character == _REPLACEMENT or _contains(self._dropped, character):
            return ""
        alone = _contains(self._alone, character)
        if self._lowercase and _contains(self._changing, character):
            character = character.lower()[0]
        return f" {character} " if alone else character


def _contains(code_points: CodePoints, character: str) -> bool:
    return bool(contains(code_points, np.array([ord(character)]))[0])


class WordPieceTokenizer(TextTokenizer):
    """A WordPiece tokenizer that divides words into tokens in a kernel."""

    def __init__(self, vocabulary: Vocabulary, *, unknown_id: int, sep_id: int, words: Words) -> None:
        super().__init__(vocabulary, space_prefix=True)
        self._encode_words = load_kernel("tokens.word_pieces", "encode")
        self._unknown_id, self._sep_id, self._words = unknown_id, sep_id, words
        tables = vocabulary.tables
        self._emitted = np.arange(tables.vocabulary_size, dtype=np.int32)
        self._emitted[vocabulary.control_mask()] = NOT_FOUND
        self._longest = int(tables.lengths.max())

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        ids = super().encode(text, add_special=add_special, parse_special=parse_special)
        return np.append(ids, np.int32(self._sep_id)) if add_special else ids

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        words = text.decode().translate(self._words).split()
        return b" ".join([SPACE + word.encode() for word in words])

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        states = np.empty(self._longest, np.int64)
        tables = self._vocabulary.tables
        return self._run(
            self._encode_words,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest,
            self._emitted.ctypes.data,
            self._unknown_id,
            states.ctypes.data,
        )
