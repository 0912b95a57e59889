"""BPE tokenizers: `gpt2` and `gemma4` in GGUF files.

`gpt2` is byte-level BPE. The vocabulary spells every byte as one printable character, so any text can be encoded.
`gemma4` is character-level BPE. Characters that are not in its vocabulary become one token per byte.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.base.errors import UnsupportedModel, shown
from llmrun.formats.layouts.tokens import NOT_FOUND, SCRATCH_BYTES_PER_BYTE
from llmrun.model.tokenizers.pretokenize import PRE_TOKENIZERS, PreTokenizer, splitter
from llmrun.model.tokenizers.text_tokenizer import SPACE, Parts, TextTokenizer, longest_piece
from llmrun.model.tokenizers.vocabulary import Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile

_DEFAULT_ID = 11  # llama.cpp's default for BOS and EOS if the file has no key for them
_NEWLINE = 0x0A
_ANY_BYTE = -1


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the 256 printable characters that represent the bytes 0 to 255 in GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return tuple(chr(spelled[byte]) for byte in range(256))


def _spellings() -> list[bytes]:
    return [character.encode() for character in byte_characters()]


def load_bpe(file: GGUFFile) -> BPETokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `gpt2`.

    Raises UnsupportedModel if the pre-tokenizer is not supported.
    """
    rule = pre_tokenizer_of(file)
    bos_id = _DEFAULT_ID if rule.has_default_bos else None
    return _load(file, rule, Defaults(bos_id=bos_id, eos_id=_DEFAULT_ID, add_bos=rule.add_bos))


def load_gemma4(file: GGUFFile) -> BPETokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `gemma4`."""
    return _load(file, PRE_TOKENIZERS["gemma4"], Defaults(bos_id=None, eos_id=None, add_bos=True))


def _load(file: GGUFFile, rule: PreTokenizer, defaults: Defaults) -> BPETokenizer:
    required = () if rule.by_character else _spellings()
    vocabulary = read_vocabulary(file, defaults, merged=True, required=required, strips_before=rule.strips_before)
    if rule.always_adds_bos:
        vocabulary = replace(vocabulary, add_bos=vocabulary.bos_id is not None)
    return BPETokenizer(vocabulary, rule)


def pre_tokenizer_of(file: GGUFFile) -> PreTokenizer:
    """Return the file's pre-tokenizer. Raises UnsupportedModel if it is not in PRE_TOKENIZERS."""
    name = file.string("tokenizer.ggml.pre", "") or "default"
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"pre-tokenizer not supported: {shown(str(file.path), 300)}: tokenizer.ggml.pre: '{shown(name)}' "
            f"is not among the {len(PRE_TOKENIZERS)} that llmrun supports",
            hint="try --backend llama, or another model",
        )
    return rule


class BPETokenizer(TextTokenizer):
    """A BPE tokenizer that splits text with a pre-tokenizer and merges pairs in a kernel."""

    def __init__(self, vocabulary: Vocabulary, rule: PreTokenizer) -> None:
        super().__init__(vocabulary)
        self._rule = rule
        self._splitter = splitter(rule.stages)
        self._merge = load_kernel("tokens.bpe_merge", "merge")
        # Other characters below 256 are not byte characters, so they become one that Latin-1 cannot encode.
        others = dict.fromkeys(range(256), "\uffff")
        self._latin_1 = others | {ord(character): chr(byte) for byte, character in enumerate(byte_characters())}
        tables = vocabulary.tables
        bytes_ = [bytes([byte]) for byte in range(256)]
        spellings = bytes_ if rule.by_character else _spellings()
        self._byte_symbols = tables.find(spellings)
        self._spelling = np.array([[len(text), *text.ljust(2, b"\0"), 0] for text in spellings], np.uint8)
        symbols = np.arange(len(tables.starts), dtype=np.int32)
        symbols[tables.vocabulary_size :] = NOT_FOUND
        symbols[: tables.vocabulary_size][vocabulary.control_mask()] = NOT_FOUND
        self._emitted = symbols
        raw = tables.find([b"<0x%02X>" % byte for byte in range(256)] if rule.by_character else bytes_)
        self._raw_byte_ids = np.where(raw == NOT_FOUND, NOT_FOUND, symbols[raw]).astype(np.int32)
        whole = rule.ignore_merges or rule.whole_newlines
        self._longest_whole = int(tables.lengths.max()) if whole else 0
        self._whole_begins = _NEWLINE if rule.whole_newlines else _ANY_BYTE

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        return text.replace(b" ", SPACE) if self._rule.escapes_spaces else text

    def _normal_bytes(self, text: bytes) -> bytes:
        if self._rule.escapes_spaces:
            return super()._normal_bytes(text)
        try:
            return text.decode().translate(self._latin_1).encode("latin-1")
        except UnicodeError:
            return text  # the token's text does not consist of byte characters

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        text, part_ends, insert_at, insert_ids = parts
        ends = self._splitter.split(text, part_ends)
        scratch = np.empty(SCRATCH_BYTES_PER_BYTE * longest_piece(ends), np.uint8)
        tables = self._vocabulary.tables
        return self._run(
            self._merge,
            (text, ends, insert_at, insert_ids),
            self._byte_symbols.ctypes.data,
            tables.pairs.ctypes.data,
            tables.pair_mask,
            self._emitted.ctypes.data,
            self._raw_byte_ids.ctypes.data,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            tables.table.ctypes.data,
            tables.mask,
            self._longest_whole,
            self._spelling.ctypes.data,
            self._whole_begins,
            int(self._rule.by_character),
            scratch.ctypes.data,
            most_per_byte=2,
        )
