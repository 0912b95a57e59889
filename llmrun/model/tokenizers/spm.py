"""The SentencePiece tokenizer, `llama` in GGUF files.

Spaces are written as U+2581, tokens merge in order of their scores, and a character outside the vocabulary is encoded
as one token per byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import KNOWN_WORD_BYTES, KNOWN_WORDS, NEVER, NOT_FOUND, SCRATCH_BYTES_PER_BYTE
from llmrun.model.tokenizers.text_tokenizer import SPACE, Parts, TextTokenizer, longest_piece
from llmrun.model.tokenizers.vocabulary import Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile


def load_spm(file: GGUFFile) -> SPMTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `llama`."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=1, eos_id=2, add_bos=True), merged=False)
    scores = np.zeros(vocabulary.tables.vocabulary_size, np.float32)
    if file.has("tokenizer.ggml.scores"):
        scores[:] = file.numbers("tokenizer.ggml.scores")
    return SPMTokenizer(vocabulary, scores, space_prefix=file.boolean("tokenizer.ggml.add_space_prefix", True))


class SPMTokenizer(TextTokenizer):
    """A SentencePiece tokenizer that merges pairs by score in a kernel."""

    def __init__(self, vocabulary: Vocabulary, scores: NDArray[np.float32], *, space_prefix: bool) -> None:
        super().__init__(vocabulary, space_prefix=space_prefix)
        self._merge = load_kernel("tokens.spm_merge", "merge")
        self._priorities = _priorities(scores)
        self._priorities[vocabulary.control_mask()] = NEVER
        self._byte_ids = _byte_ids(vocabulary)
        tables = vocabulary.tables
        self._longest = int(tables.lengths.max())
        self._joined = np.zeros(256, np.uint8)
        load_kernel("tokens.spm_merge", "find_joined")(
            tables.starts.ctypes.data, tables.lengths.ctypes.data, len(tables.starts), self._joined.ctypes.data
        )

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        spaced = b" " + text if self._space_prefix and after_special else text
        return spaced.replace(b" ", SPACE)

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        scratch = np.empty(SCRATCH_BYTES_PER_BYTE * longest_piece(parts[1]), np.uint8)
        known = np.zeros((KNOWN_WORDS, KNOWN_WORD_BYTES // 8), np.int64)
        tables = self._vocabulary.tables
        return self._run(
            self._merge,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest,
            self._priorities.ctypes.data,
            self._byte_ids.ctypes.data,
            self._joined.ctypes.data,
            known.ctypes.data,
            scratch.ctypes.data,
        )


def _priorities(scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """Convert scores to int32 values that sort in descending order of the scores.

    The bits of a float, read as an integer, sort like the float itself once the lower 31 bits of negative floats are
    flipped.
    """
    bits = (0.0 - scores).astype(np.float32).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int32)


def _byte_ids(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Return int32[256]: the token of each byte, or NOT_FOUND if the token is a control token.

    A byte's token has a text such as `<0x41>`. If no such token exists, use the token whose text is the byte itself.
    """
    named = vocabulary.tables.find([b"<0x%02X>" % byte for byte in range(256)])
    plain = vocabulary.tables.find([bytes([byte]) for byte in range(256)])
    ids = np.where(named == NOT_FOUND, plain, named)
    return np.where(vocabulary.control_mask()[ids], NOT_FOUND, ids).astype(np.int32)
