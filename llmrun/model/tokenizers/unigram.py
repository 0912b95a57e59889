"""The Unigram tokenizer of SentencePiece, `t5` in GGUF files. XLM-RoBERTa and its descendants use this tokenizer.

A table in the file (usually NFKC) normalizes the text, which is divided into the tokens with the largest sum of scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import IMPOSSIBLE, PREFIX_SLOTS
from llmrun.model.tokenizers.text_tokenizer import SPACE, Parts, TextTokenizer, longest_piece
from llmrun.model.tokenizers.vocabulary import NORMAL, UNUSED, USER_DEFINED, Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile

_UNKNOWN_ID, _EOS_ID = 2, 1  # llama.cpp's defaults if the file does not specify these tokens
_PENALTY = np.float32(10)  # the difference between the lowest score and the score of an unknown character
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


def load_unigram(file: GGUFFile) -> UnigramTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `t5`. Raises BadGGUF for an invalid table."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=None, eos_id=_EOS_ID, add_bos=False), merged=False)
    adds_eos = file.boolean("tokenizer.ggml.add_eos_token", True) and vocabulary.eos_id is not None
    scores = np.zeros(vocabulary.tables.vocabulary_size, np.float32)
    if file.has("tokenizer.ggml.scores"):
        scores[:] = file.numbers("tokenizer.ggml.scores")
    return UnigramTokenizer(
        replace(vocabulary, add_eos=adds_eos),
        scores,
        unknown_id=file.integer("tokenizer.ggml.unknown_token_id", _UNKNOWN_ID),
        replacing=_read_replacing(file),
        space_prefix=file.boolean("tokenizer.ggml.add_space_prefix", False),
        merges_spaces=file.boolean("tokenizer.ggml.remove_extra_whitespaces", False),
    )


def _read_replacing(file: GGUFFile) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the nodes of the trie of texts to replace, and the replacement texts, each terminated by a NUL.

    The file contains the size of the trie in bytes, the trie and the texts, in one array.
    """
    if not file.has(_CHARSMAP):
        return np.empty(0, np.uint32), np.zeros(1, np.uint8)
    data = file.integers(_CHARSMAP).astype(np.uint8)
    size = int(data[:4].view("<u4")[0]) if len(data) >= 4 else 0
    if len(data) < 4 or size % 4 or size + 4 >= len(data) or data[-1]:
        raise file.bad(_CHARSMAP, "must be a size, as many bytes of a trie, and texts with a NUL at the end")
    return data[4 : 4 + size].copy().view("<u4").astype(np.uint32), data[4 + size :].copy()


class UnigramTokenizer(TextTokenizer):
    """A Unigram tokenizer that normalizes and divides text in kernels."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: NDArray[np.float32],
        *,
        unknown_id: int,
        replacing: tuple[NDArray[np.uint32], NDArray[np.uint8]],
        space_prefix: bool,
        merges_spaces: bool,
    ) -> None:
        super().__init__(vocabulary, space_prefix=space_prefix)
        self._normalize = load_kernel("tokens.unigram", "normalize")
        self._divide = load_kernel("tokens.unigram", "encode")
        self._unknown_id, self._replacing = unknown_id, replacing
        self._merges_spaces = merges_spaces
        self._scores, self._unknown_score = _usable(scores, vocabulary.kinds)
        tables = vocabulary.tables
        self._longest = np.zeros(PREFIX_SLOTS, np.int32)
        load_kernel("tokens.unigram", "measure")(
            tables.starts.ctypes.data, tables.lengths.ctypes.data, len(tables.starts), self._longest.ctypes.data
        )

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        nodes, texts = self._replacing
        source = np.frombuffer(text + b"\0", np.uint8)
        count = np.zeros(1, np.int64)
        words = (
            *(source.ctypes.data, len(text), nodes.ctypes.data, len(nodes), texts.ctypes.data, len(texts)),
            *(int(self._space_prefix), int(self._merges_spaces)),
        )
        self._normalize(*words, 0, count.ctypes.data)
        normalized = np.empty(int(count[0]), np.uint8)
        self._normalize(*words, normalized.ctypes.data, count.ctypes.data)
        written = normalized.tobytes()
        return written if after_special or text.startswith(b" ") else written.removeprefix(SPACE)

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        most = longest_piece(parts[1]) + 1
        sums, origins, chosen = np.empty(most), np.empty(most, np.int64), np.empty(most, np.int32)
        tables = self._vocabulary.tables
        return self._run(
            self._divide,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest.ctypes.data,
            self._scores.ctypes.data,
            self._unknown_id,
            self._unknown_score.ctypes.data,
            sums.ctypes.data,
            origins.ctypes.data,
            chosen.ctypes.data,
        )


def _usable(scores: NDArray[np.float32], kinds: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores for the kernel, and the score of an unknown character, float64[1].

    User-defined tokens have the score 0, which makes them likely. Control tokens, the unknown token and tokens with
    the score -inf are excluded. Unknown characters are always allowed, so every text can be divided.
    """
    normal = scores[(kinds == NORMAL) & np.isfinite(scores)]
    lowest = normal.min() if len(normal) else np.float32(np.finfo(np.float32).max)
    found = np.where(np.isin(kinds, (NORMAL, UNUSED)), scores.astype(np.float64), IMPOSSIBLE)
    found[kinds == USER_DEFINED] = 0.0
    return found, np.array([lowest - _PENALTY], np.float64)
