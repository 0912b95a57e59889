"""GGUF tokenizer `llama`: SentencePiece. A space is written U+2581, tokens join by their scores, and a character
that is no token is written as its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.errors import BadGGUF
from llmrun.kernels.store import load_kernel
from llmrun.tokenizers.text_tokenizer import Pieces, TextTokenizer, longest_piece
from llmrun.tokenizers.vocabulary import CONTROL, UNKNOWN, Defaults, Vocabulary, array_of, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.gguf.reader import GGUFFile

_SPACE = "▁".encode()
_SCRATCH_BYTES_PER_BYTE = 40
_NEVER = 0x7FFFFFFF


def load_spm(file: GGUFFile) -> SPMTokenizer:
    """Raises BadGGUF for a broken vocabulary."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=1, eos_id=2, add_bos=True), merged=False)
    size = vocabulary.tables.vocabulary_size
    scores = array_of(file, "tokenizer.ggml.scores", size, np.float32)
    if scores is None:
        scores = np.zeros(size, np.float32)
    if np.isnan(scores).any():
        raise BadGGUF(f"not a number: tokenizer.ggml.scores: index {int(np.isnan(scores).argmax())}")
    add_space = file.boolean("tokenizer.ggml.add_space_prefix", default=True)
    return SPMTokenizer(vocabulary, scores.astype(np.float32), space_prefix=add_space)


class SPMTokenizer(TextTokenizer):
    def __init__(self, vocabulary: Vocabulary, scores: NDArray[np.float32], *, space_prefix: bool) -> None:
        super().__init__(vocabulary)
        self._merge = load_kernel("spm_merge", "merge")
        self._space_prefix = space_prefix
        self._priorities = _priorities(scores)
        self._priorities[vocabulary.is_control()] = _NEVER
        self._byte_ids = _byte_ids(vocabulary)
        self._longest = int(vocabulary.tables.lengths.max())

    def decode(self, ids: Sequence[int]) -> bytes:
        decoded = super().decode(ids)
        return decoded.removeprefix(b" ") if self._space_prefix else decoded

    def _split(self, text: str, *, after_special: bool) -> tuple[bytes, NDArray[np.int64]]:
        spaced = " " + text if self._space_prefix and after_special else text
        encoded = spaced.encode().replace(b" ", _SPACE)
        return encoded, np.array([len(encoded)], np.int64)

    def _normal_bytes(self, text: bytes) -> bytes:
        return text.replace(_SPACE, b" ")

    def _encode_pieces(self, pieces: Pieces) -> NDArray[np.int32]:
        text, ends, insert_at, insert_ids = pieces
        buffer = np.frombuffer(text + b"\0", np.uint8)
        scratch = np.empty(_SCRATCH_BYTES_PER_BYTE * longest_piece(ends), np.uint8)
        ids = np.empty(len(text) + len(insert_ids), np.int32)
        count = np.zeros(1, np.int64)
        tables = self._vocabulary.tables
        self._merge(
            *(buffer.ctypes.data, ends.ctypes.data, len(ends)),
            *(insert_at.ctypes.data, insert_ids.ctypes.data, len(insert_ids)),
            *(tables.table.ctypes.data, tables.mask, tables.starts.ctypes.data, tables.lengths.ctypes.data),
            *(self._longest, self._priorities.ctypes.data, self._byte_ids.ctypes.data),
            *(scratch.ctypes.data, ids.ctypes.data, count.ctypes.data),
        )
        return ids[: count[0]].copy()


def _priorities(scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """int32 values in the order of the negated floats: their bits are, once those of negative floats are flipped."""
    bits = (0.0 - scores).astype(np.float32).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int32)


def _byte_ids(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """int32[256]: the token of each byte, `<0x41>` or the character itself, else the unknown token, else -1."""
    named = vocabulary.tables.find([b"<0x%02X>" % byte for byte in range(256)])
    plain = vocabulary.tables.find([bytes([byte]) for byte in range(256)])
    kinds = vocabulary.kinds
    plain[(plain >= 0) & np.isin(kinds[plain], (CONTROL, UNKNOWN))] = -1
    unknown = np.flatnonzero(kinds == UNKNOWN)
    fallback = int(unknown[0]) if len(unknown) else -1
    ids = np.where(named >= 0, named, plain)
    return np.where(ids >= 0, ids, fallback).astype(np.int32)
