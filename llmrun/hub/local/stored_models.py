"""Finds models on this machine, in the Hugging Face cache, our own folder and other programs' folders.

The cache is read without huggingface_hub, because that import takes 0.4 s. paths.py shows the paths in the cache.

A file is trusted only after its sha256 has been verified. The expected sha256 comes from the catalogue or from the
blob's name, because the Hugging Face cache and Ollama name blobs after their sha256. model_records.py records the
verified digest, so that the next run does not have to read gigabytes again. This module does not use the network.

If Ollama or LM Studio stores a file with the digest of a model from the Hub, that file is used in place. The record of
the file contains the name under which the user asked for the model, so that the next run finds the file by this name.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.local import other_programs, paths
from llmrun.hub.local.model_records import (
    ModelRecord,
    forget,
    known_digest,
    read_record,
    records_named,
    remember_digests,
    write_record,
)
from llmrun.hub.local.paths import entries, hub_cache, is_file, model_files, read_small, repository_folder
from llmrun.hub.local.safe_writes import digest
from llmrun.hub.names import (
    COMMIT,
    Expected,
    HeldSource,
    HubSource,
    PypiSource,
    RemoteFile,
    Source,
    is_projector,
    models_among,
)
from llmrun.hub.progress_reporter import Reporter

if TYPE_CHECKING:
    from llmrun.hub.catalog import Wanted
    from llmrun.hub.remote.repository import OfferedModel

_BLOB = re.compile(r"(?:sha256-)?(?P<digits>[0-9a-f]{64})")
_ABBREVIATED = re.compile(r"[0-9a-f]{7,40}")


_REPOSITORY = "models--"
_DEEPEST = 8  # the maximum depth of folders below a snapshot or `refs`; our own paths are never deeper


class Repository(Struct, frozen=True):
    """A repository in the cache.

    name       "owner/name"
    folder     the repository's folder in the cache
    refs       maps each branch or tag to its commit
    snapshots  maps each commit to its GGUF files: paths in the repository (with "/") to paths on disk
    """

    name: str
    folder: Path
    refs: Mapping[str, str]
    snapshots: Mapping[str, Mapping[str, Path]]

    def revision_of(self, commits: Sequence[str]) -> str:
        """Return a branch or tag that refers to one of these commits, preferably "main", or else the first commit."""
        named = [revision for revision, commit in self.refs.items() if commit in commits]
        return "main" if "main" in named else next(iter(named), commits[0])


def repositories() -> Iterator[Repository]:
    """Yield every model repository in the cache, including those without GGUF files."""
    for entry in entries(hub_cache()):
        name = repository_name(entry.name)
        if name:
            yield read_repository(name)


def repository_name(folder: str) -> str:
    """Convert a folder name such as "models--owner--name" to "owner/name". Returns "" for other folders."""
    name = folder.removeprefix(_REPOSITORY).replace("--", "/", 1)
    try:
        return name if repository_folder(name).name == folder else ""
    except UsageError:
        return ""


def read_repository(name: str) -> Repository:
    """Read a repository from the cache. A missing repository counts as empty. Raises UsageError for invalid names."""
    folder = repository_folder(name)
    snapshots = {
        entry.name: dict(gguf_files(Path(entry.path)))
        for entry in entries(folder / "snapshots")
        if COMMIT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    }
    return Repository(name, folder, dict(_refs(folder / "refs")), snapshots)


def gguf_files(folder: Path, above: str = "", depth: int = 0) -> Iterator[tuple[str, Path]]:
    """Yield the paths of the GGUF files below a folder, relative (with "/") and on disk."""
    for entry in entries(folder):
        if entry.name.lower().endswith(".gguf") and is_file(entry):
            yield above + entry.name, Path(entry.path)
        elif depth < _DEEPEST and entry.is_dir(follow_symlinks=False):
            yield from gguf_files(Path(entry.path), f"{above}{entry.name}/", depth + 1)


def _refs(folder: Path, above: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for entry in entries(folder):
        if depth < _DEEPEST and entry.is_dir(follow_symlinks=False):
            yield from _refs(Path(entry.path), f"{above}{entry.name}/", depth + 1)
        elif is_file(entry):
            try:
                commit = read_small(Path(entry.path)).decode("ascii").strip()
            except (OSError, ValueError):
                continue
            if COMMIT.fullmatch(commit):
                yield above + entry.name, commit


class Candidate(Struct, frozen=True):
    """The files of a model on this machine, with their expected sizes and digests if known."""

    source: Source
    files: tuple[Path, ...]
    expected: tuple[Expected, ...]
    commit: str = ""


def find(wanted: Wanted, reporter: Reporter) -> Path | None:
    """Return the first file of a complete, undamaged model, or None. Unchanged files are hashed only once.

    Damaged files are reported and skipped.
    """
    for candidate in candidates(wanted):
        if _is_sound(candidate, wanted.name, reporter):
            return candidate.files[0]
    _tell_of_removed(wanted.name, reporter)
    return None


def candidates(wanted: Wanted) -> Iterator[Candidate]:
    """Yield the local models with matching names and sizes, the most likely match first. File contents are not read."""
    for source in wanted.sources:
        for candidate in _of_source(source, wanted.expected):
            if _have_expected_sizes(candidate):
                yield candidate
    yield from _copies(wanted.expected)
    yield from _used_before(wanted)


def find_copy(wanted: Wanted, reporter: Reporter) -> Path | None:
    """Return the first file of another program's copy of a model, or None. The expected digests must be known.

    The next run finds the copy by the model's name, even if the catalogue does not contain the digests.
    """
    sound = (copy for copy in _copies(wanted.expected) if _is_sound(copy, wanted.name, reporter))
    return next((copy.files[0] for copy in sound), None)


def _copies(expected: tuple[Expected, ...]) -> Iterator[Candidate]:
    """Yield other programs' models that have, or may have, the expected digests."""
    if not expected or not all(file.sha256 for file in expected):
        return
    for name, path in other_programs.ollama_models().items():
        if [path.name] == [f"sha256-{file.sha256}" for file in expected]:
            yield Candidate(HeldSource(other_programs.OLLAMA, name), (path,), expected)
    for name, path in other_programs.lm_studio_models().items():
        copy = Candidate(HeldSource(other_programs.LM_STUDIO, name), model_files(path), expected)
        alike = (file.size or file.file == path.name for file, path in zip(expected, copy.files, strict=False))
        if len(copy.files) == len(expected) and all(alike) and _have_expected_sizes(copy):
            yield copy


def _used_before(wanted: Wanted) -> Iterator[Candidate]:
    """Yield the unchanged copies of other programs that `find_copy` has returned for this name."""
    if any(isinstance(source, HeldSource) for source in wanted.sources):
        return
    for source, record in _uses(wanted.name):
        files = tuple(Path(file.path) for file in record.files)
        if all(map(known_digest, files)):
            yield Candidate(source, files, tuple(Expected(path.name) for path in files))


def _uses(name: str) -> Iterator[tuple[HeldSource, ModelRecord]]:
    """Yield the records of other programs' models that were used under this name, which is not their own."""
    for record in records_named(name):
        holder, _, held = record.source.partition(":")
        if holder in other_programs.FOLDER_NAMES and record.source != name:
            yield HeldSource(holder, held), record


def _tell_of_removed(name: str, reporter: Reporter) -> None:
    """Report once that another program has removed a file that was used under this name."""
    for source, record in _uses(name):
        first = Path(record.files[0].path)
        if not first.exists():
            reporter.note(f"{name}: no longer in {other_programs.FOLDER_NAMES[source.holder]}: {first}")
            forget(first)


def models_of(source: HubSource) -> list[OfferedModel]:
    """Return the local models from a repository at the source's revision. The models' sizes are given as 0."""
    repository = read_repository(source.repository)
    commit = commit_of(repository, source.revision)
    return _offered(models_among(repository.snapshots[commit])) if commit else []


def expected_digest(path: Path, expected: Expected | None = None) -> str | None:
    """Return the sha256 given by the catalogue or by the blob's own name, or None if unknown."""
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
                reporter.note(f"{path}: ignored because it cannot be read: {error.strerror}")
                return False
        if must_be is not None and known != must_be:
            if isinstance(candidate.source, HeldSource) and expected_digest(path) is None:  # of the same size by chance
                remember_digests([path], [known or ""], name="", source="")
            else:
                reporter.note(f"{path}: ignored because it is damaged: its sha256 is {known}, expected {must_be}")
            return False
        seen.append(known or "")
    if hashed:
        remember_digests(candidate.files, seen, name=name, source=str(candidate.source), commit=candidate.commit)
    if isinstance(candidate.source, HeldSource) and name != str(candidate.source):
        record = read_record(candidate.files[0])
        if record is not None and record.name != name:
            write_record(replace(record, name=name, source=str(candidate.source)))
            hashed = True
        if hashed:  # for the first time under this name
            where = other_programs.FOLDER_NAMES[candidate.source.holder]
            reporter.note(f"{name}: used from {where}, not downloaded: {candidate.files[0]}")
    return True


def _of_source(source: Source, expected: tuple[Expected, ...]) -> Iterator[Candidate]:
    match source:
        case HubSource():
            yield from _in_hub_cache(source, expected)
        case HeldSource():
            found = other_programs.find_held_model(source.holder, source.name)
            if found is not None:
                files = model_files(found)
                yield Candidate(source, files, tuple(Expected(file.name) for file in files))
        case PypiSource():
            yield from _together(source, expected, paths.own_model)
        case _:
            yield from _together(source, expected, functools.partial(paths.web_file, source.url))


def _together(source: Source, expected: tuple[Expected, ...], place: Callable[[str], Path]) -> Iterator[Candidate]:
    with contextlib.suppress(UsageError):  # none of our files can have this name
        files = tuple(place(file.file) for file in expected)
        if files and all(path.is_file() for path in files):
            yield Candidate(source, files, expected)


def _in_hub_cache(source: HubSource, expected: tuple[Expected, ...]) -> Iterator[Candidate]:
    repository = read_repository(source.repository)
    current = commit_of(repository, source.revision)
    commits = [current] if current else []
    if expected and all(file.sha256 for file in expected):  # if the digests are known, the files may be from any commit
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
    """Return the local snapshot that a branch, a tag or an abbreviated commit refers to, or None."""
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
        is_there = is_projector(source.file) and source.file in snapshot
        return (source.file,) if is_there else models.get(source.file, ())
    chosen = _best_of(models, source.quantization)
    return models[chosen] if chosen else ()


def _best_of(models: Mapping[str, Sequence[str]], quantization: str | None) -> str | None:
    """Return the model to use if the source does not name a file, or None if the choice is ambiguous."""
    from llmrun.hub.remote.repository import choose

    try:
        return choose(_offered(models), quantization).file
    except ModelNotFound:
        return None


def _offered(models: Mapping[str, Sequence[str]]) -> list[OfferedModel]:
    from llmrun.hub.remote.repository import OfferedModel

    return [
        OfferedModel(quantization_of(first), tuple(RemoteFile(file, 0, None) for file in files))
        for first, files in models.items()
    ]


def _may_be(files: Sequence[Path], expected: Sequence[Expected]) -> bool:
    """Return whether the blobs' names match the expected digests.

    A blob with a different name is a different version of the file, not a damaged file.
    """
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
