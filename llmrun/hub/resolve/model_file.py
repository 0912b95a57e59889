"""Resolves a model's name to a file on this machine, and downloads the file if necessary.

A `Pull` is the plan for one name: the local copy, or the sources from which the missing files are downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import IntegrityError, ModelFileError, ModelNotFound, NetworkError, UsageError
from llmrun.formats.gguf.source import FOLDER, NAME_A_FILE, kind_of
from llmrun.hub.catalog.file import Wanted
from llmrun.hub.local import model_records, paths, stored_models
from llmrun.hub.local.safe_writes import existing_folder, require_space
from llmrun.hub.names import Artifact, Expected, HeldSource, HubSource, Source, UrlSource, safe_segments
from llmrun.hub.progress_reporter import Reporter, Silent
from llmrun.hub.resolve import model_name
from llmrun.hub.resolve.memory_check import require_memory
from llmrun.hub.resolve.offers import Sources, fetch

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.hub.catalog.file import CatalogEntry

_ONLINE = "run once without --offline and with LLMRUN_OFFLINE and HF_HUB_OFFLINE unset"
_CHECK_PATH = "check the path, or use a name such as smollm2:135m"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model file on this machine.

    name   the name to display, which is the catalogue's name, the requested name or the file's name
    entry  the model's catalogue entry; None if the catalogue does not contain it
    """

    path: Path
    name: str
    entry: CatalogEntry | None


def resolve(
    name: str, *, offline: bool = False, reporter: Reporter, options: OpenOptions | None = None
) -> ResolvedModel:
    """Return the file for a path or model name. Downloads it if it is not on this machine.

    If `options` name RPC servers, a model that fits into their memory and this machine's is downloaded too.

    For local models, this function sends no network request and makes no slow import. It records the time of use.
    Raises ModelNotFound and all errors of a download. With `offline` (or HF_HUB_OFFLINE=1), it raises NetworkError
    instead of downloading.
    """
    asked = model_name.understand(name)
    if isinstance(asked, model_name.LocalPath):
        path = existing(asked)
        return ResolvedModel(path, path.stem, None)
    here = stored_models.find(asked, reporter)
    if here is None:
        refuse_if_offline(asked, offline)
        sources = Sources(asked, reporter)
        require_memory(sources.offer(), asked, reporter, options)
        here = fetch(sources, reporter)
    model_records.mark_used(here)
    return ResolvedModel(here, asked.name, asked.entry)


def existing(named: model_name.LocalPath) -> Path:
    """Return the path that the user gave if it is a regular file.

    Raises ModelFileError for a device or a pipe, and ModelNotFound for a missing file. For paths such as `owner/name`,
    the hint contains the corresponding Hub name.
    """
    path = named.path
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        raise ModelNotFound(f"model: {str(path)!r}: no such file", hint=_hint_for_missing(path)) from None
    except (OSError, ValueError) as error:  # the path is invalid: it is too long or contains a NUL byte
        what = getattr(error, "strerror", None) or str(error)
        raise ModelNotFound(f"model: {str(path)!r}: {what}", hint=_hint_for_missing(path)) from None
    if kind == FOLDER:
        is_checkpoint = (path / "config.json").exists()
        raise ModelNotFound(
            f"model: {str(path)!r}: is a folder, not a file",
            hint=f"convert the checkpoint first: llmrun convert {path} OUT.gguf" if is_checkpoint else _CHECK_PATH,
        )
    if kind:
        raise ModelFileError(f"model: {str(path)!r}: not a regular file: {kind}", hint=NAME_A_FILE)
    return path


def _hint_for_missing(path: Path) -> str:
    meant = model_name.on_hub(path)
    return f"did you mean {meant}?" if meant else _CHECK_PATH


def is_offline(offline: bool) -> bool:
    """Return whether the user, or an environment variable that huggingface_hub also honors, forbids network access."""
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return offline or hub.upper() in {"1", "ON", "YES", "TRUE"}


def refuse_if_offline(wanted: Wanted, offline: bool) -> None:
    """Raise NetworkError in offline mode, with the size of the download that would be required."""
    if not is_offline(offline):
        return
    sizes = [file.size for file in wanted.expected]
    known = sum(size for size in sizes if size is not None) if sizes and None not in sizes else 0
    raise NetworkError(
        f"{wanted.name}: not on this machine{f' ({known:,} bytes to download)' if known else ''}, "
        "and offline mode is on",
        hint=_ONLINE,
    )


@dataclass(frozen=True, slots=True)
class Pull:
    """A model to pull, with its location on this machine or its sources.

    here     the model's first file; None unless all files are on this machine
    pinned   the model's exact files; None for a local model whose source was not contacted
    sources  the sources to try, in order; None if only `pinned` is acceptable
    """

    name: str
    wanted: Wanted | None  # None if the user gave a path
    here: Path | None
    pinned: Artifact | None = None
    sources: Sources | None = None

    def fetch(self, reporter: Reporter) -> Path:
        """Download the model if necessary and return the path of its first file.

        Raises the same errors as `download` and `Sources.offer`.
        """
        if self.here is not None:
            return self.here
        if self.sources is not None:
            return fetch(self.sources, reporter)
        from llmrun.hub.transfer.download import download

        assert self.pinned is not None
        return download(self.pinned, reporter)

    def lockable(self, path: Path) -> Artifact:
        """Return the lock entry for the model, whose first file is now at `path`.

        Raises IntegrityError if a file's sha256 is unknown, and UsageError if the URL contains a query.
        """
        artifact = self.sources.offer() if self.sources is not None else self.pinned
        assert artifact is not None
        if isinstance(artifact.source, UrlSource) and "?" in artifact.source.url:
            raise UsageError(f"--lock: {self.name}: its URL has a query, which may be secret and is never locked")
        files = []
        for file in artifact.files:
            here = path.with_name(file.path.rpartition("/")[2])
            sha256 = file.sha256 or model_records.known_digest(here)
            if sha256 is None:
                raise IntegrityError(
                    f"{self.name}: {here.name}: its sha256 is unknown", hint=f"llmrun verify {self.name}"
                )
            files.append(replace(file, sha256=sha256))
        return replace(artifact, files=tuple(files))


def plan(name: str, reporter: Reporter, *, offline: bool) -> Pull:
    """Plan a pull that accepts a local copy without contacting the model's source.

    Raises the same errors as `resolve`, except those of the download itself.
    """
    wanted = model_name.understand(name)
    if isinstance(wanted, model_name.LocalPath):
        path = existing(wanted)
        return Pull(path.stem, None, path)
    here = stored_models.find(wanted, reporter)
    if here is not None:
        return Pull(wanted.name, wanted, here)
    refuse_if_offline(wanted, offline)
    sources = Sources(wanted, reporter)
    return Pull(wanted.name, wanted, None, sources.offer(), sources)


def plan_current(name: str, revision: str | None, reporter: Reporter, *, offline: bool) -> Pull:
    """Plan a pull of the source's current version or the given revision, ignoring local copies of other versions.

    Raises the same errors as `plan`, also for local models, because only the source knows its current version.
    """
    wanted = _fetchable(name)
    if revision is not None:
        wanted = _at_revision(wanted, revision, reporter)
    if is_offline(offline):
        raise NetworkError(f"{wanted.name}: its source cannot be asked because offline mode is on", hint=_ONLINE)
    sources = Sources(wanted, reporter)
    pinned = sources.offer()
    here = stored_models.find(_exactly(wanted, pinned), reporter)
    return Pull(wanted.name, wanted, here, pinned, sources if here is None else None)


def plan_locked(name: str, lock: Mapping[str, Artifact], reporter: Reporter, *, offline: bool) -> Pull:
    """Plan a pull of exactly the files in the lock file.

    Raises IntegrityError if the local files or the source do not match the lock file.
    """
    wanted = _fetchable(name)
    held = lock.get(wanted.name)
    if held is None:
        raise IntegrityError(f"{wanted.name}: not in the lock file", hint=f"llmrun pull --lock {wanted.name}")
    again = f"llmrun pull --lock {wanted.name}"
    _refuse_another_meaning(wanted, held, again)
    exact = _exactly(wanted, held)
    here, named = stored_models.find(exact, reporter), stored_models.find(wanted, Silent())
    if named is not None and (here is None or not named.samefile(here)):
        seen = model_records.known_digest(named)
        raise IntegrityError(
            f"{wanted.name}: the local file differs from the lock file: {named}{f' has sha256 {seen}' if seen else ''},"
            f" expected {held.files[0].sha256}",
            hint=f"run `llmrun rm {wanted.name}` and pull --locked again, or lock the local file: {again}",
        )
    pinned = replace(held, name=wanted.name, source=_as_named(wanted, held))
    if named is None and here is None:
        refuse_if_offline(exact, offline)
        try:
            Sources(exact, reporter).offer()
        except IntegrityError as error:
            raise IntegrityError(
                str(error), hint=f"the locked files are no longer available; lock the current ones: {again}"
            ) from error
    return Pull(wanted.name, wanted, named, pinned)


def require_room(pulls: Sequence[Pull]) -> None:
    """Raise DoesNotFit unless each disk has enough free space for all models that will be downloaded to it."""
    from llmrun.hub.transfer.download import bytes_here

    needed: dict[int, tuple[Path, int, list[str]]] = {}  # device number -> (a folder on it, bytes, models)
    for pull in pulls:
        if pull.pinned is not None and pull.here is None:
            folder = existing_folder(_folder_of(pull.pinned))
            disk = folder.stat().st_dev
            _, size, names = needed.get(disk, (folder, 0, []))
            needed[disk] = (folder, size + pull.pinned.size - bytes_here(pull.pinned), [*names, pull.name])
    for folder, size, names in needed.values():
        require_space(folder, size, names[0] if len(names) == 1 else f"{len(names)} models")


def _folder_of(artifact: Artifact) -> Path:
    return paths.hub_cache() if isinstance(artifact.source, HubSource) else paths.models_folder()


def _fetchable(name: str) -> Wanted:
    wanted = model_name.understand(name)
    if isinstance(wanted, model_name.LocalPath) or any(isinstance(source, HeldSource) for source in wanted.sources):
        raise UsageError(f"{name}: a local file has no source to download from")
    return wanted


def _at_revision(wanted: Wanted, revision: str, reporter: Reporter) -> Wanted:
    safe_segments(revision)
    hub = [source for source in wanted.sources if isinstance(source, HubSource)]
    if not hub:
        raise UsageError(f"--revision: {wanted.name} does not come from a repository of the Hub")
    if hub[0].revision not in ("main", revision):
        raise UsageError(f"--revision: {revision} contradicts the name, which says {hub[0].revision}")
    sources = tuple(replace(source, revision=revision) for source in hub)
    if wanted.expected:
        reporter.note(
            f"{wanted.name}: --revision ignores the catalogue's sha256; run the downloaded model as {sources[0]}"
        )
    return replace(wanted, name=str(sources[0]), sources=sources, expected=())


def _exactly(wanted: Wanted, pinned: Artifact) -> Wanted:
    """Return the same request, pinned to one commit and to the sizes and digests of its files."""
    source = pinned.source
    if isinstance(source, HubSource):
        source = replace(source, revision=pinned.commit)
    expected = tuple(Expected(file.path.rpartition("/")[2], file.size, file.sha256) for file in pinned.files)
    return replace(wanted, sources=(source,), expected=expected)


def _as_named(wanted: Wanted, held: Artifact) -> Source:
    """Return the source in the lock file, with the requested name's branch instead of the commit.

    The download then points the local branch to the locked commit, so the name also resolves to this commit later.
    """
    source = held.source
    if isinstance(source, HubSource):
        for named in wanted.sources:
            if isinstance(named, HubSource) and named.repository == source.repository:
                return replace(source, revision=named.revision)
    return source


def _refuse_another_meaning(wanted: Wanted, held: Artifact, again: str) -> None:
    """Raise IntegrityError if the name no longer refers to the locked model.

    If the catalogue contains the sha256 of all files, these must equal those in the lock file. Otherwise, the sources
    must match.
    """
    known = [file.sha256 for file in wanted.expected]
    if known and None not in known:
        if known != [file.sha256 for file in held.files]:
            raise IntegrityError(
                f"{wanted.name}: the catalogue and the lock file differ: sha256 {known[0]} in the catalogue, "
                f"{held.files[0].sha256} in the lock file",
                hint=f"lock the catalogue's file: {again}",
            )
    elif not any(_is_place_of(source, held) for source in wanted.sources):
        raise IntegrityError(f"{wanted.name}: the name no longer refers to the locked {held.source}", hint=again)


def _is_place_of(source: Source, held: Artifact) -> bool:
    if isinstance(source, HubSource) and isinstance(held.source, HubSource):
        return source.repository == held.source.repository and source.file in (None, held.source.file)
    return str(source).partition("?")[0] == str(held.source).partition("?")[0]
