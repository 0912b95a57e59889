"""Finding a model on this machine: in the cache shared with other tools, in our own folder, in another program's.

A file is trusted once its sha256 has been verified. The expected sha256 stands in the catalogue, or in the blob's own
name: the shared cache and Ollama name a file by its sha256. A record (model_records.py) spares the next start from
reading gigabytes. No network is used here.
"""

from __future__ import annotations

import contextlib
import functools
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import ModelNotFound, UsageError
from llmrun.hub.catalog.entry import Wanted
from llmrun.hub.local import lm_studio, ollama, paths
from llmrun.hub.local.hub_cache import Repository, read_repository
from llmrun.hub.local.model_records import known_digest, remember_digests
from llmrun.hub.local.safe_writes import digest
from llmrun.hub.local.scandir import model_files
from llmrun.hub.names.file_names import models_among, quantization_of
from llmrun.hub.names.model_sources import Expected, HeldSource, HubSource, PypiSource, RemoteFile, Source
from llmrun.hub.progress_reporter import Reporter

if TYPE_CHECKING:
    from llmrun.hub.remote.repository_listing import OfferedModel

_BLOB = re.compile(r"(?:sha256-)?(?P<digits>[0-9a-f]{64})")
_ABBREVIATED = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """All files of a model that is here; expected says what they must be, as far as that is known."""

    source: Source
    files: tuple[Path, ...]
    expected: tuple[Expected, ...]
    commit: str = ""


def find(wanted: Wanted, reporter: Reporter) -> Path | None:
    """The first file of a whole model. Nothing is hashed that was hashed before; a damaged file is not used."""
    found = find_sound(wanted, reporter)
    return found.files[0] if found is not None else None


def find_sound(wanted: Wanted, reporter: Reporter) -> Candidate | None:
    """Return the first candidate with the bytes that it must have. Damaged files are noted, and skipped."""
    for candidate in candidates(wanted):
        if _is_sound(candidate, wanted.name, reporter):
            return candidate
    return None


def candidates(wanted: Wanted) -> Iterator[Candidate]:
    """Models that are here by name and size, the likeliest first. No bytes are read."""
    for source in wanted.sources:
        for candidate in _of_source(source, wanted.expected):
            if _have_expected_sizes(candidate):
                yield candidate


def models_of(source: HubSource) -> list[OfferedModel]:
    """The models of a repository that are here, in the revision that is meant; of their sizes nothing is said: 0."""
    repository = read_repository(source.repository)
    commit = commit_of(repository, source.revision)
    return _offered(models_among(repository.snapshots[commit])) if commit else []


def expected_digest(path: Path, expected: Expected | None = None) -> str | None:
    """What a file's sha256 must be: as the catalogue says, or as its own name says; None where nobody says."""
    if expected is not None and expected.sha256 is not None:
        return expected.sha256
    match = _BLOB.fullmatch(path.resolve().name)
    return match["digits"] if match else None


def _is_sound(candidate: Candidate, name: str, reporter: Reporter) -> bool:
    seen, hashed = [], False
    for path, expected in zip(candidate.files, candidate.expected, strict=True):
        must_be = expected_digest(path, expected)
        known = known_digest(path)
        if known is None and must_be is not None:
            try:
                known, hashed = digest(path, reporter, f"checking {name}"), True
            except OSError as error:
                reporter.note(f"{path}: cannot be read: {error.strerror}; not used")
                return False
        if must_be is not None and known != must_be:
            reporter.note(f"{path}: damaged: sha256 {known}, expected {must_be}; not used")
            return False
        seen.append(known or "")
    if hashed:
        remember_digests(candidate.files, seen, name=name, source=str(candidate.source), commit=candidate.commit)
    return True


def _of_source(source: Source, expected: tuple[Expected, ...]) -> Iterator[Candidate]:
    match source:
        case HubSource():
            yield from _in_hub_cache(source, expected)
        case HeldSource():
            found = {ollama.HOLDER: ollama, lm_studio.HOLDER: lm_studio}[source.holder].find(source.name)
            if found is not None:
                files = model_files(found)
                yield Candidate(source, files, tuple(Expected(file.name) for file in files))
        case PypiSource():
            yield from _together(source, expected, paths.own_model)
        case _:
            at = functools.partial(paths.web_file, source.url)
            yield from _together(source, expected or (Expected(_last_segment(source.url)),), at)


def _together(source: Source, expected: tuple[Expected, ...], place: Callable[[str], Path]) -> Iterator[Candidate]:
    with contextlib.suppress(UsageError):  # a name that no file of ours can have
        files = tuple(place(file.file) for file in expected)
        if files and all(path.is_file() for path in files):
            yield Candidate(source, files, expected)


def _in_hub_cache(source: HubSource, expected: tuple[Expected, ...]) -> Iterator[Candidate]:
    repository = read_repository(source.repository)
    current = commit_of(repository, source.revision)
    commits = [current] if current else []
    if expected and all(file.sha256 for file in expected):  # the bytes are known: any commit that has them will do
        commits += [commit for commit in repository.snapshots if commit != current]
    for commit in commits:
        snapshot = repository.snapshots[commit]
        names = _named_files(snapshot, source)
        if names and len(names) == len(expected or names):
            files = tuple(snapshot[name] for name in names)
            known = expected or tuple(Expected(path.name) for path in files)
            if _may_be(files, known):
                yield Candidate(source, files, known, commit)


def commit_of(repository: Repository, revision: str) -> str | None:
    """The snapshot that a branch, a tag or a commit (its beginning is enough) means, of those that are here."""
    commit = repository.refs.get(revision)
    if commit in repository.snapshots:
        return commit
    if not _ABBREVIATED.fullmatch(revision):
        return None
    meant = [commit for commit in repository.snapshots if commit.startswith(revision)]
    return meant[0] if len(meant) == 1 else None


def _named_files(snapshot: Mapping[str, Path], source: HubSource) -> tuple[str, ...]:
    models = models_among(snapshot)
    if source.file is not None:
        return models.get(source.file, ())
    chosen = _best_of(models, source.quantization)
    return models[chosen] if chosen else ()


def _best_of(models: Mapping[str, Sequence[str]], quantization: str | None) -> str | None:
    """Which of the models that are here a name means that leaves the file open; None where that cannot be told."""
    from llmrun.hub.remote.quantization_choice import choose

    try:
        return choose(_offered(models), quantization).file
    except ModelNotFound:
        return None


def _offered(models: Mapping[str, Sequence[str]]) -> list[OfferedModel]:
    from llmrun.hub.remote.repository_listing import OfferedModel

    return [
        OfferedModel(quantization_of(first), tuple(RemoteFile(file, 0, None) for file in files))
        for first, files in models.items()
    ]


def _may_be(files: Sequence[Path], expected: Sequence[Expected]) -> bool:
    """Whether no blob's name says that it is another file than the catalogue means: a newer one, not a damaged one."""
    names = map(expected_digest, files)
    return all(known.sha256 in (None, name or known.sha256) for name, known in zip(names, expected, strict=True))


def _have_expected_sizes(candidate: Candidate) -> bool:
    try:
        return all(
            expected.size in (None, path.stat().st_size)
            for path, expected in zip(candidate.files, candidate.expected, strict=True)
        )
    except OSError:
        return False


def _last_segment(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1])
