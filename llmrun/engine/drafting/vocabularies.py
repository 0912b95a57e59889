"""Compares the vocabularies of a model and its draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.errors import UsageError
from llmrun.tokenizers.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.tokenizers.base import Tokenizer


def check_same_vocabulary(draft: Backend, target: Backend) -> None:
    """Raise UsageError unless the tokens with the same ids are equal, and the same ones end answers.

    One of the vocabularies may be longer, because files pad them to different sizes.
    """
    size = min(draft.info.vocabulary_size, target.info.vocabulary_size)
    token = _first_difference(draft.tokenizer, target.tokenizer, size)
    if token is None:
        return
    raise UsageError(
        f"draft model has a different vocabulary: {draft.info.path}: token {token} is "
        f"{_words(draft.tokenizer, token)}, but {_words(target.tokenizer, token)} in {target.info.path}",
        hint="choose a draft model of the same family",
    )


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
