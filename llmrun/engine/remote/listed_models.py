"""Chooses a model from the list of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

OWNER: Final = "llmrun"  # `owned_by` of the models of our own servers


def default_model(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the model to use if the user names none: the only one, or the first one of an llmrun server.

    Such servers list the default model first, and after it all other models on their machine. Returns None if the user
    must choose.
    """
    if len(models) == 1 or (models and models[0].get("owned_by") == OWNER):
        return models[0]
    return None
