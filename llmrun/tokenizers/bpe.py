"""GGUF tokenizer `gpt2`: byte-level BPE. A byte is spelled as one printable character in the vocabulary, so every
text has ids, and ids any bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import UnsupportedModel
from llmrun.gguf.problems import shown
from llmrun.kernels.store import load_kernel
from llmrun.kernels.token_layout import NOT_FOUND, SCRATCH_BYTES_PER_BYTE
from llmrun.tokenizers.pretokenize import PRE_TOKENIZERS, SUPPORTED_KINDS, PreTokenizer
from llmrun.tokenizers.text_tokenizer import Pieces, TextTokenizer, longest_piece
from llmrun.tokenizers.vocabulary import Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.gguf.reader import GGUFFile

_DEFAULT_ID = 11  # llama.cpp's BOS and EOS for a file that names none


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The 256 printable characters that spell the bytes 0 to 255. Source: GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return tuple(chr(spelled[byte]) for byte in range(256))


def _spellings() -> list[bytes]:
    return [character.encode() for character in byte_characters()]


def load_bpe(file: GGUFFile) -> BPETokenizer:
    """The tokenizer of a file whose `tokenizer.ggml.model` is `gpt2`. Raises UnsupportedModel as `pre_tokenizer_of`."""
    rule = pre_tokenizer_of(file)
    bos_id = _DEFAULT_ID if rule.has_default_bos else None
    defaults = Defaults(bos_id=bos_id, eos_id=_DEFAULT_ID, add_bos=rule.add_bos)
    return BPETokenizer(read_vocabulary(file, defaults, merged=True, required=_spellings()), rule)


def pre_tokenizer_of(file: GGUFFile) -> PreTokenizer:
    """Raises UnsupportedModel for a pre-tokenizer that is not in PRE_TOKENIZERS."""
    name = file.string("tokenizer.ggml.pre", "") or "default"
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"pre-tokenizer not supported: {shown(str(file.path), 300)}: tokenizer.ggml.pre: '{shown(name)}', "
            f"supported are {', '.join(SUPPORTED_KINDS)} and the names that mean one of these",
            hint="Another model may run here, and this one may run with --backend llama.",
        )
    return rule


class BPETokenizer(TextTokenizer):
    def __init__(self, vocabulary: Vocabulary, rule: PreTokenizer) -> None:
        super().__init__(vocabulary)
        self._rule = rule
        self._merge = load_kernel("bpe_merge", "merge")
        self._byte_of_character = {character: byte for byte, character in enumerate(byte_characters())}
        tables = vocabulary.tables
        self._byte_symbols = tables.find(_spellings())
        self._spelling = np.array([[len(text), *text.ljust(2, b"\0"), 0] for text in _spellings()], np.uint8)
        symbols = np.arange(len(tables.starts), dtype=np.int32)
        symbols[tables.vocabulary_size :] = NOT_FOUND
        symbols[: tables.vocabulary_size][vocabulary.control_mask()] = NOT_FOUND
        self._emitted = symbols
        raw = tables.find([bytes([byte]) for byte in range(256)])
        self._raw_byte_ids = np.where(raw == NOT_FOUND, NOT_FOUND, symbols[raw]).astype(np.int32)
        self._longest_whole = int(tables.lengths.max()) if rule.ignore_merges else 0

    def _split(self, text: str, *, after_special: bool) -> tuple[bytes, NDArray[np.int64]]:
        return self._rule.split(text)

    def _normal_bytes(self, text: bytes) -> bytes:
        try:
            return bytes([self._byte_of_character[character] for character in text.decode()])
        except (KeyError, UnicodeDecodeError):
            return text  # not spelled in byte characters: shown as it is

    def _encode_pieces(self, pieces: Pieces) -> NDArray[np.int32]:
        text, ends, insert_at, insert_ids = pieces
        buffer = np.frombuffer(text + b"\0", np.uint8)
        scratch = np.empty(SCRATCH_BYTES_PER_BYTE * longest_piece(ends), np.uint8)
        ids = np.empty(2 * len(text) + len(insert_ids), np.int32)
        count = np.zeros(1, np.int64)
        tables = self._vocabulary.tables
        self._merge(
            *(buffer.ctypes.data, ends.ctypes.data, len(ends)),
            *(insert_at.ctypes.data, insert_ids.ctypes.data, len(insert_ids)),
            *(self._byte_symbols.ctypes.data, tables.pairs.ctypes.data, tables.pair_mask),
            *(self._emitted.ctypes.data, self._raw_byte_ids.ctypes.data),
            *(tables.starts.ctypes.data, tables.lengths.ctypes.data, tables.table.ctypes.data, tables.mask),
            *(self._longest_whole, self._spelling.ctypes.data),
            *(scratch.ctypes.data, ids.ctypes.data, count.ctypes.data),
        )
        return ids[: count[0]].copy()
