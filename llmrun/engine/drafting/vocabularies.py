"""Compares the vocabularies of two models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.model.tokenizers.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.model.tokenizers.base import Tokenizer


def check_same_vocabulary(draft: Backend, target: Backend) -> None:
    """Raise UsageError unless the tokens with the same ids are equal, and the same ones end answers.

    One of the vocabularies may be longer, because files pad them to different sizes.
    """
    if words := difference_in_words(draft, target):
        raise UsageError(
            f"draft model has a different vocabulary: {words}", hint="choose a draft model of the same family"
        )


def difference_in_words(one: Backend, other: Backend) -> str:
    """Describe the first token in which two vocabularies differ, or return "". The longer one may have more tokens."""
    token = _first_difference(one.tokenizer, other.tokenizer, min(one.info.vocabulary_size, other.info.vocabulary_size))
    if token is None:
        return ""
    words = _words(one.tokenizer, token), _words(other.tokenizer, token)
    return f"{one.info.path}: token {token} is {words[0]}, but {words[1]} in {other.info.path}"


def _first_difference(one: Tokenizer, other: Tokenizer, size: int) -> int | None:
    """Return the first token below `size` that differs, or None."""
    ending = one.end_of_generation ^ other.end_of_generation
    differing = min((token for token in ending if token < size), default=None)
    if isinstance(one, TextTokenizer) and one.begins_like(other, size):
        return differing
    texts = (
        token
        for token in range(size)
        if one.token_text(token) != other.token_text(token) or one.token_bytes(token) != other.token_bytes(token)
    )
    return next(texts, differing)


def _words(tokenizer: Tokenizer, token: int) -> str:
    kind = " (ends an answer)" if token in tokenizer.end_of_generation else ""
    kind = kind or (" (control token)" if tokenizer.token_text(token) and not tokenizer.token_bytes(token) else "")
    return f"{tokenizer.token_text(token)!r}{kind}"
