"""Opens a model, or a model and its base side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmrun.backends.select import open_backend
from llmrun.base.errors import DoesNotFit, UsageError
from llmrun.jobs.evaluation.measuring import check_same_vocabulary

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions


class Source(NamedTuple):
    """A model file and the options for opening it."""

    path: Path
    options: OpenOptions


@contextmanager
def opened(model: Source, base: Source | None) -> Iterator[list[Backend]]:
    """Open a model and its base, if it has one, and close them at the end. Yields the model first.

    Raises the errors of `open_backend`: DoesNotFit if the base does not fit beside the model. Raises UsageError if the
    models have different vocabularies, or the model has no logits.
    """
    with ExitStack() as held:
        backend = open_backend(*model)
        held.callback(backend.close)
        if not backend.info.has_logits:
            raise UsageError(f"{backend.info.name} computes embeddings and predicts no text", hint="name another model")
        if base is None:
            yield [backend]
            return
        # Our own cache takes memory when it is filled. llama.cpp has already filled its cache with zeros.
        reserved = backend.info.kv_bytes if backend.info.backend == "cpu" else 0
        try:
            other = open_backend(base.path, replace(base.options, reserved_memory=reserved))
        except DoesNotFit as error:
            raise DoesNotFit(
                f"both models must fit in memory at the same time: {error}",
                hint="close other programs, or compare smaller models",
            ) from error
        held.callback(other.close)
        check_same_vocabulary(backend, other)
        yield [backend, other]
