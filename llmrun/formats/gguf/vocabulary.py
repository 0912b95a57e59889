"""Checks the rules for `tokenizer.ggml.*` that llama.cpp's vocabulary loader and tokenizers rely on.

In llama.cpp, breaking a rule fails an assertion or throws an exception that a C caller cannot catch. A file that breaks
a rule kills the process instead of failing to load. The tokenizers that llmrun itself supports are in tokenizers/.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from llmrun.base.errors import shown
from llmrun.formats.gguf.metadata import Metadata, StringArray

PREFIX = "tokenizer.ggml."
TOKENS = PREFIX + "tokens"
MODEL = PREFIX + "model"
MERGES = PREFIX + "merges"
SCORES = PREFIX + "scores"
TOKEN_TYPES = PREFIX + "token_type"
SUPPRESSED = PREFIX + "suppress_tokens"

TYPE_LIMIT = 6  # 0 undefined, 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte

# The misspelling "seperator" is part of the GGUF format.
SPECIAL_IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "mask", "cls"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    *("prefix", "suffix", "middle"),  # older names of the first three FIM (fill-in-the-middle) IDs
)
# Some published models have a padding ID of -1, or an ID after the last token. Only the type of the ID is checked,
# because neither llmrun nor llama.cpp uses padding IDs.
PADDING_ID = PREFIX + "padding_token_id"

FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")


class _Defaults(NamedTuple):
    """The values that llama.cpp assumes for missing keys. llama.cpp asserts that all tokens added to prompts exist."""

    bos: int
    eos: int
    add_bos: bool


_DEFAULTS = {"llama": _Defaults(1, 2, True), "gpt2": _Defaults(11, 11, False)}
_NEEDS_MERGES = ("gpt2", "gemma4")
_NO_TOKENIZER = ("none", "no_vocab")  # tokenizers without tokens; llama.cpp aborts if a token is requested
_WORDPIECE = "bert"
_BYTE = 6
_RWKV_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)


def check_vocabulary(file: Metadata) -> None:
    """Check the vocabulary of a file that has `tokenizer.ggml.tokens`. Raises BadGGUF with the name of the key."""
    tokens = file.strings(TOKENS)
    model = file.string(MODEL)
    file.string(PREFIX + "pre", "")
    if not len(tokens):
        raise file.bad(TOKENS, "the vocabulary is empty")
    if model in _NO_TOKENIZER:
        raise file.bad(MODEL, f"is '{model}' although the file has {TOKENS}")
    _check_unique(file, tokens)
    _check_scores(file, len(tokens))
    _check_token_types(file, tokens, model)
    _check_merges(file, model)
    _check_special_ids(file, model, len(tokens))
    if model == "llama":
        _check_byte_fallback(file, tokens)
    if model == "rwkv":
        _check_first_bytes(file, tokens)


def _check_unique(file: Metadata, tokens: StringArray) -> None:
    """Check that all tokens are different, as llama.cpp asserts.

    llama.cpp truncates a token at its first NUL byte, and derives the name of an empty token from the token's ID.
    """
    positions = tokens.positions()
    empty = int(np.count_nonzero(tokens.lengths == 0))
    if len(positions) + max(empty - 1, 0) != len(tokens):
        _refuse_duplicates(file, tokens)
    if empty:
        for index in np.flatnonzero(tokens.lengths == 0).tolist():
            other = positions.get(b"[EMPTY_%d]" % index)
            if other is not None:
                raise file.bad(TOKENS, f"token {other} has the name that llama.cpp gives to empty token {index}")
    if b"\0" in b"".join(positions):
        index, text = next((index, text) for text, index in positions.items() if b"\0" in text)
        raise file.bad(TOKENS, f"token {index}, '{shown(text)}', contains a NUL byte")


def _refuse_duplicates(file: Metadata, tokens: StringArray) -> None:
    first: dict[bytes, int] = {}
    for index, text in enumerate(tokens.all_raw()):
        if text and text in first:
            raise file.bad(TOKENS, f"tokens {first[text]} and {index} are both '{shown(text)}'")
        first[text] = index


def _check_scores(file: Metadata, n_tokens: int) -> None:
    if not file.has(SCORES):
        return
    _check_array(file, SCORES, ("arr[f32]", "arr[i32]"), n_tokens)
    bad = np.isnan(file.numbers(SCORES).astype(np.float32))
    if bad.any():
        raise file.bad(SCORES, f"the score of token {int(bad.argmax())} is not a number")


def _check_token_types(file: Metadata, tokens: StringArray, model: str) -> None:
    if not file.has(TOKEN_TYPES):
        return
    _check_array(file, TOKEN_TYPES, ("arr[i32]",), len(tokens))
    types = file.integers(TOKEN_TYPES).astype(np.int32)
    outside = (types < 0) | (types > TYPE_LIMIT)
    if outside.any():
        index = int(outside.argmax())
        raise file.bad(TOKEN_TYPES, f"token {index} must have type 0 to {TYPE_LIMIT}, not {types[index]}")
    if model == _WORDPIECE and (types == _BYTE).any():
        index = int((types == _BYTE).argmax())
        raise file.bad(
            TOKEN_TYPES, f"token {index} has type {_BYTE} (byte), but a '{model}' tokenizer has no byte tokens"
        )


def _check_array(file: Metadata, key: str, types: tuple[str, ...], n_tokens: int) -> None:
    if file.types[key] not in types:
        raise file.bad(key, f"must be {' or '.join(types)}, not {file.types[key]}")
    n = len(file.numbers(key))
    if n != n_tokens:
        raise file.bad(key, f"must have {n_tokens} entries, one for each token, not {n}")


def _check_merges(file: Metadata, model: str) -> None:
    """Check that every merge is two strings separated by a space.

    The left string may begin with a space, so the separator is the first space after the first byte.
    """
    if not file.has(MERGES):
        if model in _NEEDS_MERGES and file.string(PREFIX + "pre", "") != "kimi-k2":
            raise file.bad(MERGES, f"the key is missing, but a '{shown(model)}' tokenizer needs it")
        return
    merges = file.strings(MERGES)
    if not len(merges):
        return
    ends = merges.starts + merges.lengths
    first, end = int(merges.starts[0]), int(ends[-1])
    spaces = np.flatnonzero(merges.data[first:end] == ord(" ")) + first
    # A length field may also contain the byte 0x20. Comparing with `ends` ignores bytes outside the strings.
    spaces = np.append(spaces, end)
    border = spaces[np.searchsorted(spaces[:-1], merges.starts + 1)]
    wrong = border >= ends - 1
    if wrong.any():
        index = int(wrong.argmax())
        seen = f"merge {index}, '{shown(merges.raw(index))}'"
        raise file.bad(MERGES, f"{seen}, must be two strings separated by a space")


def _check_special_ids(file: Metadata, model: str, n_tokens: int) -> None:
    for name in SPECIAL_IDS:
        key = f"{PREFIX}{name}_token_id"
        if file.has(key):
            _check_u32(file, key)
            file.integer(key, maximum=n_tokens - 1)
    if file.has(PADDING_ID):
        _check_u32(file, PADDING_ID)
    for name in FLAGS:
        file.boolean(PREFIX + name, None)
    if file.has(SUPPRESSED) and file.types[SUPPRESSED] != "arr[i32]":
        raise file.bad(SUPPRESSED, f"must be arr[i32], not {file.types[SUPPRESSED]}")
    if model == _WORDPIECE:  # WordPiece always adds the first two tokens, and uses the third for unknown words
        for name, default in (("bos", 101), ("seperator", 102), ("unknown", 100)):
            _check_added(file, name, default, n_tokens, added=True)
    defaults = _DEFAULTS.get(model)
    if defaults is not None:
        _check_added(file, "bos", defaults.bos, n_tokens, file.boolean(PREFIX + "add_bos_token", defaults.add_bos))
        _check_added(file, "eos", defaults.eos, n_tokens, file.boolean(PREFIX + "add_eos_token", False))


def _check_u32(file: Metadata, key: str) -> None:
    if file.types[key] != "u32":
        raise file.bad(key, f"must be u32, not {file.types[key]}")


def _check_added(file: Metadata, name: str, default: int, n_tokens: int, added: bool) -> None:
    key = f"{PREFIX}{name}_token_id"
    if added and not file.has(key) and default >= n_tokens:
        raise file.bad(key, f"the key is missing, and its default of {default} is not among the {n_tokens} tokens")


def _check_first_bytes(file: Metadata, tokens: StringArray) -> None:
    """Check that the first byte of every token is itself a token.

    llama.cpp consumes the longest token that is a prefix of the remaining text. If not even the first byte is a token,
    llama.cpp loops forever and keeps allocating memory.
    """
    begun: dict[int, int] = {}
    alone: set[int] = set()
    for index, text in enumerate(tokens.all_raw()):
        plain = _RWKV_ESCAPE.sub(_unescaped, text)
        if plain:
            begun.setdefault(plain[0], index)
        if len(plain) == 1:
            alone.add(plain[0])
    for byte, index in begun.items():
        if byte not in alone:
            seen = f"token {index}, '{shown(tokens.raw(index))}', begins with the byte 0x{byte:02X}"
            raise file.bad(TOKENS, f"{seen}, but there is no token for that byte, which a 'rwkv' tokenizer needs")


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if code[:1] == b"x":
        return bytes([int(code[1:], 16)])
    return {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(code, code)


def _check_byte_fallback(file: Metadata, tokens: StringArray) -> None:
    """Check that every byte has a token.

    A SentencePiece tokenizer encodes text without a token as bytes. llama.cpp throws if the token for a byte is
    missing.
    """
    positions = tokens.positions()
    for byte in range(256):
        if b"<0x%02X>" % byte not in positions and bytes([byte]) not in positions:
            raise file.bad(TOKENS, f"no token for the byte 0x{byte:02X}, but a 'llama' tokenizer needs all 256")
