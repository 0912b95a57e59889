"""Hash tables of a vocabulary's tokens and merges, for the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import NOT_FOUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.values import StringArray


@dataclass(frozen=True)
class _Texts:
    """The addresses and lengths in bytes of some texts, int64[n] each, and the array that owns the memory."""

    owner: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def in_file(cls, texts: StringArray) -> _Texts:
        return cls(texts.data, texts.starts + texts.data.ctypes.data, texts.lengths.astype(np.int64))

    @classmethod
    def copied(cls, texts: Sequence[bytes]) -> _Texts:
        owner = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        lengths = np.array([len(text) for text in texts], np.int64)
        return cls(owner, owner.ctypes.data + np.cumsum(lengths) - lengths, lengths)


class TokenTables:
    """Hash tables that map texts to token ids, and pairs of ids to the ids that they merge into.

    Merges may contain texts that are not tokens, and a byte may have no token. Such texts get ids from
    `vocabulary_size` up, so that merging can work with ids alone. These ids never appear in the result.

    `starts`, int64[symbols], holds the addresses of the texts, in the file's header or in memory owned by this object.
    `lengths`, int64[symbols], holds their lengths in bytes. kernels/tokens/token_table.py describes `table`, `pairs`
    and the masks.
    """

    def __init__(self, tokens: StringArray, merges: StringArray | None = None, required: Sequence[bytes] = ()) -> None:
        """Build the tables. Each text in `required` gets an id even if it is not a token."""
        self._build_kernel = load_kernel("tokens.token_table", "build")
        self.vocabulary_size = len(tokens)
        texts = _Texts.in_file(tokens)
        self.starts, self.lengths = texts.starts, texts.lengths
        self._owners = [texts.owner]
        self._name_empty_tokens()
        unresolved = self._build(merges)
        missing = self._missing([*required, *_sides_and_products(merges, unresolved)])
        if missing:
            more = self._own(missing)
            self.starts = np.concatenate([self.starts, more.starts])
            self.lengths = np.concatenate([self.lengths, more.lengths])
            self._build(merges)

    def find(self, texts: Sequence[bytes]) -> NDArray[np.int32]:
        """Return int32[texts]: the id of each text, or NOT_FOUND."""
        wanted = _Texts.copied(texts)
        ids = np.empty(len(texts), np.int32)
        self._run(n_tokens=0, wanted=wanted, ids=ids, merges=_Texts.copied(()))
        return ids

    def text(self, token: int) -> bytes:
        """Return a token's text as spelled in the vocabulary."""
        return ctypes.string_at(int(self.starts[token]), int(self.lengths[token]))

    def texts(self, n: int) -> list[bytes]:
        """Return the texts of the first n tokens."""
        return list(map(ctypes.string_at, self.starts[:n].tolist(), self.lengths[:n].tolist()))

    def _build(self, merges: StringArray | None) -> NDArray[np.int32]:
        """Fill the tables. Returns the indices of merges that contain a text without an id."""
        merge_texts = _Texts.copied(()) if merges is None else _Texts.in_file(merges)
        n_merges = len(merge_texts.starts)
        self.table = np.zeros(_slots(2 * len(self.starts)), np.int64)
        self.mask = len(self.table) - 1
        self.pairs = np.zeros((_slots(n_merges + n_merges // 2), 2), np.int64)
        self.pair_mask = len(self.pairs) - 1
        nothing = _Texts.copied(())
        return self._run(n_tokens=len(self.starts), wanted=nothing, ids=np.empty(0, np.int32), merges=merge_texts)

    def _run(self, *, n_tokens: int, wanted: _Texts, ids: NDArray[np.int32], merges: _Texts) -> NDArray[np.int32]:
        """Insert the first `n_tokens` texts, look up the wanted texts and insert the merges.

        Writes the ids of the wanted texts to `ids`. Returns the indices of merges that contain a text without an id.
        """
        unresolved = np.empty(len(merges.starts), np.int32)
        n_unresolved = np.empty(1, np.int64)
        self._build_kernel(
            *(self.starts.ctypes.data, self.lengths.ctypes.data, n_tokens),
            *(self.table.ctypes.data, self.mask),
            *(wanted.starts.ctypes.data, wanted.lengths.ctypes.data, len(ids), ids.ctypes.data),
            *(merges.starts.ctypes.data, merges.lengths.ctypes.data, len(merges.starts)),
            *(self.pairs.ctypes.data, self.pair_mask),
            *(unresolved.ctypes.data, n_unresolved.ctypes.data),
        )
        return unresolved[: n_unresolved[0]]

    def _missing(self, texts: Sequence[bytes]) -> list[bytes]:
        unique = list(dict.fromkeys(texts))
        return [text for text, id_ in zip(unique, self.find(unique).tolist(), strict=True) if id_ == NOT_FOUND]

    def _name_empty_tokens(self) -> None:
        """Name tokens without text as llama.cpp does, for example `[EMPTY_5]`."""
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            names = self._own([b"[EMPTY_%d]" % token for token in empty.tolist()])
            self.starts[empty], self.lengths[empty] = names.starts, names.lengths

    def _own(self, texts: Sequence[bytes]) -> _Texts:
        copied = _Texts.copied(texts)
        self._owners.append(copied.owner)
        return copied


def _sides_and_products(merges: StringArray | None, ranks: NDArray[np.int32]) -> list[bytes]:
    """Return the left side, the right side and the result of each of the given merges."""
    texts: list[bytes] = []
    for text in [merges.raw(rank) for rank in ranks.tolist()] if merges is not None else []:
        middle = text.index(b" ", 1)
        left, right = text[:middle], text[middle + 1 :]
        texts += [left, right, left + right]
    return texts


def _slots(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 2."""
    return 1 << max(n - 1, 1).bit_length()
