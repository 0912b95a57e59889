"""Lists the available quantizations of a model, each with its exact files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, ModelNotFound
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.local import stored_models
from llmrun.hub.names.model_sources import Artifact, HubSource, PypiSource
from llmrun.hub.progress_reporter import Reporter, Silent
from llmrun.hub.remote import huggingface
from llmrun.hub.remote.network_errors import Unreachable
from llmrun.hub.resolve.source_fallback import Sources

if TYPE_CHECKING:
    from llmrun.hub.catalog.entry import CatalogEntry
    from llmrun.hub.remote.repository_listing import Listing, OfferedModel


def offers(wanted: Wanted, reporter: Reporter) -> tuple[Artifact, ...]:
    """Return all quantizations of a model, the smallest first, or only the quantization that the name specifies.

    Wheels are excluded because they do not support range requests. If nothing is available, raises the same errors as
    `Sources.offer`. Raises Unreachable after the first repository that does not respond, because all repositories are
    on the same Hub.
    """
    found: tuple[Artifact, ...] = ()
    if leaves_open(wanted):
        known = wanted.entry is not None and wanted.name == wanted.entry.name
        found = _of_entry(wanted.entry, reporter) if known and wanted.entry else _of_repository(wanted)
    return found or (readable_in_parts(wanted, reporter),)


def readable_in_parts(wanted: Wanted, reporter: Reporter) -> Artifact:
    """Return the artifact of the first source that supports range requests, which excludes wheels.

    Raises the same errors as `Sources.offer`.
    """
    sources = tuple(source for source in wanted.sources if not isinstance(source, PypiSource))
    return Sources(replace(wanted, sources=sources or wanted.sources), reporter).offer()


def here(wanted: Wanted) -> list[tuple[str, Path]]:
    """Return (name, first file) of each matching model on this machine, the smallest first.

    A name without a quantization matches all quantizations. This function uses no network and hashes no files.
    """
    meant = [wanted]
    if leaves_open(wanted):
        known = wanted.entry is not None and wanted.name == wanted.entry.name
        meant = _names_of_entry(wanted.entry) if known and wanted.entry else _names_here(wanted)
    found = [(each.name, one.files[0]) for each in meant if (one := next(stored_models.candidates(each), None))]
    return sorted(found, key=lambda one: one[1].stat().st_size)


def leaves_open(wanted: Wanted) -> bool:
    """Return whether the name does not specify a quantization."""
    if wanted.entry is not None and wanted.name == wanted.entry.name:
        return len(wanted.entry.quants) > 1 and not wanted.is_exact
    (source, *_) = wanted.sources
    return isinstance(source, HubSource) and source.file is None and source.quantization is None


def all_offers(artifact: Artifact, wanted: Wanted) -> tuple[Artifact, ...]:
    """Return all quantizations of an artifact's model, the smallest first. Raises the same errors as `listing`."""
    if wanted.entry is not None and not wanted.name.startswith("hf:"):
        return _of_entry(wanted.entry, Silent())
    if not isinstance(artifact.source, HubSource):
        return ()
    whole = HubSource(artifact.source.repository, revision=artifact.source.revision)
    return _of_repository(Wanted(str(whole), (whole,)))


def _names_of_entry(entry: CatalogEntry) -> list[Wanted]:
    return [Wanted(entry.name_with(quant.name), quant.sources, quant.files, entry) for quant in entry.quants.values()]


def _names_here(wanted: Wanted) -> list[Wanted]:
    """Return names for the repository's models that are in the shared Hub cache."""
    (source, *_) = wanted.sources
    assert isinstance(source, HubSource)
    models = stored_models.models_of(source)
    quantizations = [model.quantization for model in models]
    named = [replace(source, **_part(model, quantizations)) for model in models]
    return [Wanted(str(one), (one,)) for one in named]


def _of_entry(entry: CatalogEntry, reporter: Reporter) -> tuple[Artifact, ...]:
    """Return the quantizations of a catalogue entry, which may come from several repositories.

    Repositories that cannot be listed are skipped with a note.
    """
    listings: dict[str, Listing | None] = {}
    found = []
    for quant in entry.quants.values():
        source = quant.sources[0]
        if not isinstance(source, HubSource):
            continue
        if source.repository not in listings:
            listings[source.repository] = _listing(source, reporter)
        listing = listings[source.repository]
        models = {model.file: model for model in listing.models} if listing else {}
        if listing and source.file in models:
            found.append(Artifact(entry.name_with(quant.name), source, models[source.file].files, listing.commit))
    return _smallest_first(found)


def _listing(source: HubSource, reporter: Reporter) -> Listing | None:
    try:
        return huggingface.listing(source)
    except Unreachable:
        raise
    except LlmrunError as error:
        reporter.note(f"hf:{source.repository}: {error}")
        return None


def _of_repository(wanted: Wanted) -> tuple[Artifact, ...]:
    (source, *_) = wanted.sources
    assert isinstance(source, HubSource)
    listing = huggingface.listing(source)
    if not listing.models:
        raise ModelNotFound(f"{wanted.name}: the repository has no GGUF model")
    quantizations = [model.quantization for model in listing.models]
    return _smallest_first(
        [
            Artifact(str(replace(source, **_part(model, quantizations))), source, model.files, listing.commit)
            for model in listing.models
        ]
    )


def _part(model: OfferedModel, quantizations: list[str]) -> dict[str, str]:
    """Return the fields of HubSource that distinguish this model from the repository's other models."""
    if model.quantization and quantizations.count(model.quantization) == 1:
        return {"quantization": model.quantization}
    return {"file": model.file}


def _smallest_first(artifacts: list[Artifact]) -> tuple[Artifact, ...]:
    return tuple(sorted(artifacts, key=lambda artifact: artifact.size))
