"""Reads the vocabulary of a GGUF file: token texts and types, special tokens, and the rules for BOS and EOS.

This module also builds the hash tables of tokens and merges that the kernels use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import NOT_FOUND
from llmrun.model.tokenizers.control_tokens import KNOWN_TEXTS, FillTokens, fill_tokens, find_ending_tokens, find_roles
from llmrun.model.tokenizers.special import MARK, SpecialToken, SpecialTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.metadata import StringArray
    from llmrun.formats.gguf.reader import GGUFFile


@dataclass(frozen=True)
class _Texts:
    """The addresses and byte lengths of a list of texts, int64[n] each, and the array that owns the memory."""

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

    Merges may contain texts that are not tokens, and a byte may have no token. The ids of such texts start at
    `vocabulary_size`, so that merging can work with ids alone. The added ids never appear in the encoded text.

    `starts`, int64[symbols], holds the addresses of the texts, in the file's header or in memory owned by this object.
    `lengths`, int64[symbols], holds the lengths of the texts in bytes. kernels/tokens/token_table.py describes `table`,
    `pairs` and the masks.
    """

    def __init__(self, tokens: StringArray, merges: StringArray | None = None, required: Sequence[bytes] = ()) -> None:
        """Build the tables. Each text in `required` receives an id even if the text is not a token."""
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
            self.starts.ctypes.data,
            self.lengths.ctypes.data,
            n_tokens,
            self.table.ctypes.data,
            self.mask,
            wanted.starts.ctypes.data,
            wanted.lengths.ctypes.data,
            len(ids),
            ids.ctypes.data,
            merges.starts.ctypes.data,
            merges.lengths.ctypes.data,
            len(merges.starts),
            self.pairs.ctypes.data,
            self.pair_mask,
            unresolved.ctypes.data,
            n_unresolved.ctypes.data,
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


# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_NAMED_TOKENS = ("bos", "eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_FORMER_NAMES = ("prefix", "suffix", "middle")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of one kind of tokenizer, for keys that the file does not contain."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a model, with its special tokens."""

    tables: TokenTables
    kinds: NDArray[np.int32]  # the file's token types, with CONTROL for tokens whose text marks them as control tokens
    special: SpecialTokens
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    end_of_generation: frozenset[int]
    fill_tokens: FillTokens | None

    def control_mask(self) -> NDArray[np.bool_]:
        """Return bool[tokens]: True for control and unknown tokens, which never represent plain text."""
        return np.isin(self.kinds, (CONTROL, UNKNOWN))


def read_vocabulary(
    file: GGUFFile, defaults: Defaults, *, merged: bool, required: Sequence[bytes] = (), strips_before: str = ""
) -> Vocabulary:
    """Read the keys `tokenizer.ggml.*`.

    merged         True if this kind of tokenizer reads merges from the file
    required       texts that must have an id even if they are not tokens
    strips_before  the special token that strips preceding whitespace

    The kernels require that tokens are unique, that arrays are as long as the vocabulary, and that ids are in range.
    The GGUF reader checked these requirements when the file was opened.
    """
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = file.strings("tokenizer.ggml.merges") if merged else None
    tables = TokenTables(tokens, merges, required)
    size = len(tokens)
    named = _named_tokens(file)
    known_ids = tables.find([text.encode() for text in KNOWN_TEXTS]).tolist()
    known = {text: id_ for text, id_ in zip(KNOWN_TEXTS, known_ids, strict=True) if 0 <= id_ < size}
    bos_id = named.get("bos_token_id", _inside(defaults.bos_id, size))
    eos_id = named.get("eos_token_id", _inside(defaults.eos_id, size))
    roles = find_roles(known, named)
    ending, control = find_ending_tokens(known, named, eos_id, roles)
    add_bos = file.boolean("tokenizer.ggml.add_bos_token", default=defaults.add_bos) and bos_id is not None
    kinds = _kinds(file, size)
    kinds[list(control)] = CONTROL
    return Vocabulary(
        tables=tables,
        kinds=kinds,
        special=_special_tokens(tables, kinds, file, strips_before),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos,
        add_eos=file.boolean("tokenizer.ggml.add_eos_token", default=False) and eos_id is not None,
        end_of_generation=ending,
        fill_tokens=fill_tokens(roles, bos_id if add_bos else None),
    )


def _kinds(file: GGUFFile, size: int) -> NDArray[np.int32]:
    if not file.has("tokenizer.ggml.token_type"):
        return np.full(size, NORMAL, np.int32)
    return np.array(file.integers("tokenizer.ggml.token_type"), np.int32)


def _named_tokens(file: GGUFFile) -> dict[str, int]:
    """Return the token ids in the file's keys, indexed by the last part of the key."""
    keys = [f"{name}_token_id" for name in (*_NAMED_TOKENS, *_FORMER_NAMES)]
    return {key: file.integer(f"tokenizer.ggml.{key}") for key in keys if file.has(f"tokenizer.ggml.{key}")}


def _inside(token: int | None, size: int) -> int | None:
    return token if token is not None and token < size else None


def _special_tokens(tables: TokenTables, kinds: NDArray[np.int32], file: GGUFFile, strips_before: str) -> SpecialTokens:
    name = file.string("general.name", default="").lower()
    # GGUF has no key for whitespace stripping, so llama.cpp decides by the model's name.
    strips_right = "phi-3" in name or "phi3" in name
    if "modern-bert" in name and not strips_before:
        strips_before = "[MASK]"
    found = []
    for token in np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN) | (kinds == USER_DEFINED)).tolist():
        try:
            text = tables.text(token).decode()
        except UnicodeDecodeError:
            continue  # this token never matches, because text never contains invalid UTF-8
        if MARK in text:
            continue  # only `protect` may insert marks into a rendered text
        right = strips_right and not strips_before and text not in ("<unk>", "<s>", "<|endoftext|>")
        left = text == strips_before
        found.append(SpecialToken(token, text, kinds[token] != USER_DEFINED, strips_left=left, strips_right=right))
    return SpecialTokens(found)
