"""A vocabulary's texts and merges in the kernels' look-up tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels.store import load_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.gguf.values import StringArray

NOT_FOUND = -1


class TokenTables:
    """Text to token id, and pairs of ids to what they merge into.

    A merge may name texts that are no tokens, and a byte may have no token: such texts get ids from
    `vocabulary_size` on, so that merging works on ids alone; none of them is ever an answer.

    `starts` int64[symbols] are addresses (of the mapped file, or of bytes kept here), `lengths` int64[symbols] bytes;
    `table`, `pairs` and the masks are described in kernels/token_table.py.
    """

    def __init__(self, tokens: StringArray, merges: StringArray | None = None, required: Sequence[bytes] = ()) -> None:
        """`required` are texts that must have an id, token or not."""
        self._tokens = tokens
        self._merges = merges
        self._kept: list[NDArray[np.uint8]] = []
        self._run = load_kernel("token_table", "build")
        self.vocabulary_size = len(tokens)
        self.starts = tokens.starts + tokens.data.ctypes.data
        self.lengths = tokens.lengths.astype(np.int64)
        self._name_empty_tokens()
        unresolved = self._build()
        missing = self._missing([*required, *self._texts_of(unresolved)])
        if missing:
            self._append(missing)
            self._build()

    def find(self, texts: Sequence[bytes]) -> NDArray[np.int32]:
        """int32[texts]: the id of each text, NOT_FOUND where there is none."""
        addresses, lengths = self._keep_texts(texts)
        ids = np.empty(len(texts), np.int32)
        n_unresolved = np.empty(1, np.int64)
        self._run(
            *(self.starts.ctypes.data, self.lengths.ctypes.data, 0, self.table.ctypes.data, self.mask),
            *(addresses.ctypes.data, lengths.ctypes.data, len(texts), ids.ctypes.data),
            *(0, 0, 0, 0, 0, 0, n_unresolved.ctypes.data),
        )
        self._kept.pop()
        return ids

    def text(self, token: int) -> bytes:
        """A token's text as the vocabulary spells it."""
        return self._tokens.raw(token) or _name_of_empty(token)

    def _build(self) -> NDArray[np.int32]:
        """Fill the tables; returns the merges that name a text without an id."""
        merges = self._merges
        n_merges = len(merges) if merges is not None else 0
        self.table = np.zeros(_slots(2 * len(self.starts)), np.int64)
        self.mask = len(self.table) - 1
        self.pairs = np.zeros((_slots(n_merges + n_merges // 2), 2), np.int64)
        self.pair_mask = len(self.pairs) - 1
        merge_starts = merges.starts + merges.data.ctypes.data if merges is not None else np.empty(0, np.int64)
        merge_lengths = merges.lengths.astype(np.int64) if merges is not None else np.empty(0, np.int64)
        unresolved = np.empty(n_merges, np.int32)
        n_unresolved = np.empty(1, np.int64)
        self._run(
            *(self.starts.ctypes.data, self.lengths.ctypes.data, len(self.starts)),
            *(self.table.ctypes.data, self.mask),
            *(0, 0, 0, 0),
            *(merge_starts.ctypes.data, merge_lengths.ctypes.data, n_merges),
            *(self.pairs.ctypes.data, self.pair_mask, unresolved.ctypes.data, n_unresolved.ctypes.data),
        )
        return unresolved[: n_unresolved[0]]

    def _texts_of(self, merges: NDArray[np.int32]) -> list[bytes]:
        """The left sides, right sides and products of some merges."""
        texts = []
        for rank in merges.tolist():
            assert self._merges is not None
            text = self._merges.raw(rank)
            middle = text.index(b" ", 1)
            texts += [text[:middle], text[middle + 1 :], text[:middle] + text[middle + 1 :]]
        return texts

    def _missing(self, texts: Sequence[bytes]) -> list[bytes]:
        unique = list(dict.fromkeys(texts))
        return [text for text, id_ in zip(unique, self.find(unique).tolist(), strict=True) if id_ == NOT_FOUND]

    def _append(self, texts: Sequence[bytes]) -> None:
        addresses, lengths = self._keep_texts(texts)
        self.starts = np.concatenate([self.starts, addresses])
        self.lengths = np.concatenate([self.lengths, lengths])

    def _name_empty_tokens(self) -> None:
        """llama.cpp gives a token without text the name `[EMPTY_5]`."""
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            addresses, lengths = self._keep_texts([_name_of_empty(token) for token in empty.tolist()])
            self.starts[empty], self.lengths[empty] = addresses, lengths

    def _keep_texts(self, texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(addresses, lengths) of texts that are not in the file; the bytes stay alive with this object."""
        self._kept.append(np.frombuffer(b"".join(texts) + b"\0", np.uint8))
        lengths = np.array([len(text) for text in texts], np.int64)
        return self._kept[-1].ctypes.data + np.cumsum(lengths) - lengths, lengths


def _name_of_empty(token: int) -> bytes:
    return b"[EMPTY_%d]" % token


def _slots(n: int) -> int:
    """The power of two that is at least n and 2."""
    return 1 << max(n - 1, 1).bit_length()
