"""Finds the control tokens that end an answer, and the control tokens of fill-in-the-middle prompts.

GGUF files specify only some control tokens, such as one or two tokens that end an answer. The other control tokens are
found by their text. The rules and the texts are llama.cpp's (`llama_vocab_is_eog`, `llama_vocab_fim_pre` and others),
so answers end at the same token as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The ids of the control tokens in fill-in-the-middle prompts.

    bos         the token before the prefix, or None
    prefix, suffix, middle  begin the text before the gap, the text after the gap, and the answer
    repository  begins the name of the repository, or None
    file        begins the name of each file, or None
    """

    bos: int | None
    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


class Role(NamedTuple):
    """The role of a token in prompts, and how to find the token.

    keys   the keys that may specify the token, without the prefix `tokenizer.ggml.`; the last key in the file counts
    texts  the texts to look for if the file contains none of these keys
    ends   True if the token also ends an answer
    """

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    ends: bool = False


_PREFIX = Role(
    ("fim_pre_token_id", "prefix_token_id"),
    (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
)
_SUFFIX = Role(
    ("fim_suf_token_id", "suffix_token_id"),
    (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
)
_MIDDLE = Role(
    ("fim_mid_token_id", "middle_token_id"),
    (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
)
_PADDING = Role(("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True)
_REPOSITORY = Role(
    ("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True
)
_FILE = Role(("fim_sep_token_id",), ("<|file_sep|>",), ends=True)

ROLES = (_PREFIX, _SUFFIX, _MIDDLE, _PADDING, _REPOSITORY, _FILE)


class Found(NamedTuple):
    """The token of a role, and whether the token was found by its text. Tokens found by text become control tokens."""

    token: int
    by_text: bool


def find_roles(known: Mapping[str, int], named: Mapping[str, int]) -> dict[Role, Found]:
    """Return the tokens of the vocabulary for the given roles.

    known  maps the texts that are in the vocabulary to their ids
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    """
    found = {}
    for role in ROLES:
        if by_key := [named[key] for key in role.keys if key in named]:
            found[role] = Found(by_key[-1], by_text=False)
        elif by_text := [known[text] for text in role.texts if text in known]:
            found[role] = Found(by_text[0], by_text=True)
    return found


def fill_tokens(found: Mapping[Role, Found], bos: int | None) -> FillTokens | None:
    """Return the tokens for prompts, or None if one of the three required tokens is missing."""
    tokens = [found[role].token if role in found else None for role in (_PREFIX, _SUFFIX, _MIDDLE, _REPOSITORY, _FILE)]
    return checked_fill_tokens(bos, *tokens)


def fill_tokens_of(file: GGUFFile) -> FillTokens | None:
    """Return a file's fill-in-the-middle tokens, except BOS, without loading the vocabulary."""
    texts = {text for role in ROLES for text in role.texts}
    tokens = file.strings("tokenizer.ggml.tokens")
    # Comparing only the tokens that begin like one of the texts is a hundred times as fast.
    beginnings = tokens.data[np.minimum(tokens.starts, len(tokens.data) - 1)]
    likely = np.flatnonzero(np.isin(beginnings, [text.encode()[0] for text in texts])).tolist()
    known = {tokens[number]: number for number in likely if tokens[number] in texts}
    keys = [key for role in ROLES for key in role.keys if file.has(f"tokenizer.ggml.{key}")]
    return fill_tokens(find_roles(known, {key: file.integer(f"tokenizer.ggml.{key}") for key in keys}), bos=None)


def checked_fill_tokens(
    bos: int | None,
    prefix: int | None,
    suffix: int | None,
    middle: int | None,
    repository: int | None,
    file: int | None,
) -> FillTokens | None:
    """Return FillTokens with the given ids, or None if one of the three required ids is missing."""
    if prefix is None or suffix is None or middle is None:
        return None
    return FillTokens(bos, prefix, suffix, middle, repository, file)


# Tokens with these texts end an answer, and are control tokens even if the file specifies otherwise.
ENDING_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# The token ids under these keys of the file end an answer.
ENDING_KEYS = ("eot_token_id", "eom_token_id")

KNOWN_TEXTS = (*ENDING_TEXTS, "<|plamo:eos|>", *(text for role in ROLES for text in role.texts))


def find_ending_tokens(
    known: Mapping[str, int], named: Mapping[str, int], eos_id: int | None, roles: Mapping[Role, Found]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer and the ids that are control tokens because of their text.

    known  maps those KNOWN_TEXTS that are in the vocabulary to their ids
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    roles  the result of `find_roles`
    """
    ending = {named[key] for key in ENDING_KEYS if key in named}
    ending |= {found.token for role, found in roles.items() if role.ends}
    control = {found.token for found in roles.values() if found.by_text}
    spelled = {known[text] for text in ENDING_TEXTS if text in known}
    ending |= spelled
    control |= spelled
    if eos_id is not None:
        ending.add(eos_id)

    def ends(text: str) -> bool:
        return known.get(text) in ending

    # In vocabularies with these tokens, <|end|> ends one message of an answer, not the whole answer.
    if (ends("<|call|>") or ends("<|calls|>")) and (ends("<|return|>") or ends("<|flush|>")):
        ending.discard(known.get("<|end|>", -1))
    # In vocabularies with these tokens, </s> is an ordinary word.
    if "</s>" in known and (ends("<|tool_response>") or ends("<|plamo:eos|>")):
        ending.discard(known["</s>"])
        control.discard(known["</s>"])
    return frozenset(ending), frozenset(control)
