"""Reads the vocabulary of a GGUF file: token texts and types, special tokens, and the rules for BOS and EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.tokenizers.end_of_generation import KNOWN_TEXTS, find_ending_tokens
from llmrun.model.tokenizers.fill_in_middle import FillTokens, fill_tokens, find_roles
from llmrun.model.tokenizers.special import MARK, SpecialToken, SpecialTokens
from llmrun.model.tokenizers.tables import TokenTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile

# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_NAMED_TOKENS = ("bos", "eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_FORMER_NAMES = ("prefix", "suffix", "middle")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of one kind of tokenizer, for keys that the file does not have."""

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
        """Return bool[tokens]: True for control and unknown tokens, which never stand for plain text."""
        return np.isin(self.kinds, (CONTROL, UNKNOWN))


def read_vocabulary(
    file: GGUFFile, defaults: Defaults, *, merged: bool, required: Sequence[bytes] = (), strips_before: str = ""
) -> Vocabulary:
    """Read the keys `tokenizer.ggml.*`.

    merged         True if this kind of tokenizer reads merges from the file
    required       texts that must have an id even if they are not tokens
    strips_before  the special token that removes the whitespace before it

    The kernels require that tokens are unique, that arrays are as long as the vocabulary, and that ids are in range.
    The GGUF reader checked all of this when the file was opened.
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
    """Return the token ids in the file's keys, by the last part of the key."""
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
            continue  # only `protect` may put marks into a rendered text
        right = strips_right and not strips_before and text not in ("<unk>", "<s>", "<|endoftext|>")
        left = text == strips_before
        found.append(SpecialToken(token, text, kinds[token] != USER_DEFINED, strips_left=left, strips_right=right))
    return SpecialTokens(found)
