"""Resolves the draft model that --speculate names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.engine.remote.url import is_endpoint
from llmrun.options.settings import model_named

Found = TypeVar("Found")


def resolved_draft(name: str, resolve: Callable[[str], Found]) -> Found:
    """Return what `resolve` returns for the name of a draft model or a preset. Errors name --speculate.

    Raises UsageError for a model on a server, and the errors of `resolve`, such as ModelNotFound.
    """
    name = model_named(name)
    if is_endpoint(name):
        raise UsageError(f"--speculate: {name}: a draft model must run on this machine", hint="name a local model")
    try:
        return resolve(name)
    except ModelNotFound as error:
        raise ModelNotFound(f"--speculate: {str(error).removeprefix('model: ')}", hint=error.hint) from error
