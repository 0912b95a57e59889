"""What to say of a context that is longer than the texts a model was trained with."""

from __future__ import annotations


def beyond_training(name: str, context: int, trained: int) -> str:
    """Return a warning if a context of so many tokens is longer than the model was trained for, else an empty string.

    trained  0: not known
    """
    if not 0 < trained < context:
        return ""
    return f"{context:,} tokens of context: {name} was trained for {trained:,}, and its text may get worse beyond them"
