"""The warning about a context that is longer than the model was trained for."""

from __future__ import annotations


def beyond_training(name: str, context: int, trained: int) -> str:
    """Return a warning if the context is longer than the model was trained for, or an empty string otherwise.

    context  context size in tokens
    trained  context size in tokens that the model was trained for, or 0 if unknown
    """
    if not 0 < trained < context:
        return ""
    return f"{context:,} tokens of context: {name} was trained for {trained:,}, and output may get worse beyond that"
