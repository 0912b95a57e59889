"""Lists all GGUF models on this machine, including those that other programs downloaded.

Each model has a name that all commands accept. For models in the Hugging Face cache, the name is the catalogue name,
`hf:owner/name:QUANTIZATION` or `hf:owner/name/FILE`. If a newer revision has replaced the model, the name includes the
commit. Models in our own folder are named by their files. A model whose name would mean something else, such as a
preset, is named by its path. Only `facts_of` opens model files.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, ModelFileError, ModelNotFound, UsageError
from llmrun.formats.gguf.glance import Glance, glance
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.local import paths as places
from llmrun.hub.local.model_records import ModelRecord, read_record
from llmrun.hub.local.other_programs import LM_STUDIO, OLLAMA, lm_studio_models, ollama_models
from llmrun.hub.local.own_models import OwnModel, key_of, own_models
from llmrun.hub.local.paths import entries, is_file, model_files
from llmrun.hub.local.stored_models import Repository, repositories
from llmrun.hub.names import Expected, HeldSource, HubSource, models_among, safe_segments, shards_of

if TYPE_CHECKING:
    from llmrun.hub.catalog import Catalog

SHARED = "hub"  # the cache that all Hugging Face tools share
OWN = "llmrun"
USERS = "user"  # a file that the user gave as a path
_SHORT = 10  # the number of digits in an abbreviated commit


@dataclass(frozen=True, slots=True)
class Model:
    """A complete model, in one file or in shards.

    name      the name to use in commands, such as `-m NAME` and `llmrun rm NAME`
    holder    the owner of the model's folder: SHARED, OWN, "ollama" or "lmstudio"; USERS for a file given as a path
    files     the model's files; the first one is the file to open
    size      the total size of all files in bytes
    modified  the time when the first file was last written, in seconds since 1970
    record    llmrun's record of the model, if any
    source    where the same model can be downloaded; None if unknown
    commits   the snapshots in the shared cache with the same contents and name; `name` refers to the first
    current   whether no newer revision has replaced the model
    """

    name: str
    holder: str
    files: tuple[Path, ...]
    size: int
    modified: float
    record: ModelRecord | None = None
    source: HubSource | HeldSource | None = None
    commits: tuple[str, ...] = ()
    current: bool = True

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def used(self) -> float:
        """The time when llmrun last opened the model, in seconds since 1970; 0.0 if never."""
        return self.record.used if self.record else 0.0

    @property
    def repository(self) -> str:
        """The repository on the Hub, such as "owner/name", or "" for other sources."""
        return self.source.repository if isinstance(self.source, HubSource) else ""


def models() -> list[Model]:
    """Return all models in the Hugging Face cache, our own folder and other programs' folders. Names are unique."""
    catalogue = functools.cache(sound_catalogue)
    shared = [model for repository in repositories() for model in models_of(repository, catalogue)]
    own, hidden = own_models(), hidden_names(catalogue())
    taken = {each.key for each in own}
    found = [_by_path(model, hidden | taken) for model in shared]
    taken |= {model.name.lower() for model in shared}
    found += [_by_path(model, hidden) for model in (*_named(own, taken), *_of_single_folders())]
    for holder, held in ((OLLAMA, ollama_models()), (LM_STUDIO, lm_studio_models())):
        found += [model for name, path in held.items() if (model := _held(holder, name, path))]
    return found


def hidden_names(catalogue: Catalog | None) -> set[str]:
    """Return the names, in lower case, that do not mean the model of the same name."""
    from llmrun.options.settings import load_presets

    hidden = set()
    with contextlib.suppress(LlmrunError):  # the command that uses an invalid preset will report it
        hidden = {name for name, preset in load_presets().items() if preset.model.lower() != name}
    shortnames = catalogue.shortnames if catalogue else {}
    return hidden | {name for name, target in shortnames.items() if target.lower() != name}


def _by_path(model: Model, hidden: Collection[str]) -> Model:
    return replace(model, name=str(model.path)) if key_of(model.name) in hidden else model


def select(name: str, among: Sequence[Model]) -> Model:
    """Return the model to which a name refers. The name may be any name or path of the model.

    Raises ModelNotFound, or UsageError for an invalid name.
    """
    for model in among:
        if name.lower() == model.name.lower():
            return model
    from llmrun.hub.local import stored_models
    from llmrun.hub.resolve.model_file import LocalPath, on_hub, understand

    meant = understand(name)
    hub_name = None
    if isinstance(meant, LocalPath):
        paths, hub_name = [meant.path], on_hub(meant.path)
    else:
        paths = [candidate.files[0] for candidate in stored_models.candidates(meant)]
    for path in paths:
        for model in among:
            if os.path.abspath(path) in map(os.path.abspath, model.files):  # noqa: PTH100
                return model
    hint = f"did you mean {hub_name}?" if hub_name else "`llmrun list` shows the models on this machine"
    raise ModelNotFound(f"model: {name!r}: not on this machine", hint=hint)


def of_path(path: Path) -> Model:
    """Return the model at a path that the user gave, including its other shards. The model's name is the path.

    Raises ModelNotFound, or ModelFileError if the file is a shard other than the first.
    """
    from llmrun.hub.resolve.model_file import LocalPath, existing

    existing(LocalPath(path))
    try:
        files = tuple(path.with_name(shard) for shard in shards_of(path.name))
    except ValueError as error:
        raise ModelFileError(f"{error}") from error
    status = path.stat()
    return Model(str(path), USERS, files, total_size(files), status.st_mtime)


def facts_of(model: Model) -> tuple[Glance, str]:
    """Read a model's header, and return a few of its fields and an error message, which is "" on success."""
    try:
        return facts_in(model.path), ""
    except LlmrunError as error:
        return Glance(quantization=quantization_of(model.path.name)), str(error)


def facts_in(path: Path) -> Glance:
    """Read a few fields of a file's header. Raises ModelNotFound, ModelFileError and BadGGUF."""
    facts = glance(path)
    if facts.quantization:
        return facts
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.model.archs.parts.tensors import quantization

    with open_gguf(path) as file:  # slow, but nearly all files state their quantization
        return facts._replace(quantization=quantization(file))


def total_size(files: Iterable[Path]) -> int:
    """Return the total size in bytes. A file with several links counts only once."""
    found = {}
    for path in files:
        with contextlib.suppress(OSError):  # the file was deleted in the meantime
            status = path.stat()
            found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


def models_of(repository: Repository, catalogue: Callable[[], Catalog | None]) -> list[Model]:
    """Return the models in one repository. If several snapshots contain the same model, it is returned only once."""
    commits_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for commit, snapshot in repository.snapshots.items():
        for first, files in models_among(snapshot).items():
            real = tuple(os.path.realpath(snapshot[file]) for file in files)
            commits_of.setdefault((first, real), []).append(commit)
    found = (_shared(repository, first, commits, catalogue) for (first, _), commits in commits_of.items())
    return [model for model in found if model]


def _shared(
    repository: Repository, file: str, commits: list[str], catalogue: Callable[[], Catalog | None]
) -> Model | None:
    revision = repository.revision_of(commits)
    named = repository.refs.get(revision, revision)
    snapshot = repository.snapshots[named]
    files = tuple(snapshot[each] for each in models_among(snapshot)[file])
    record = read_record(files[0])
    # The commit is abbreviated because its first digits are enough to find it in the cache.
    source = HubSource(repository.name, file, revision=revision if revision in repository.refs else revision[:_SHORT])
    name = _name(source, snapshot, files, catalogue)
    is_current = not repository.refs or not set(commits).isdisjoint(repository.refs.values())
    ordered = (named, *(commit for commit in commits if commit != named))
    return _model(name, SHARED, files, record, source, ordered, is_current)


def _name(
    source: HubSource, snapshot: Mapping[str, Path], files: Sequence[Path], catalogue: Callable[[], Catalog | None]
) -> str:
    """Return the catalogue name if it refers to the same bytes, or else the shortest unambiguous `hf:` name."""
    assert source.file is not None
    loaded = catalogue() if source.revision == "main" else None
    known = loaded.name_of(source.repository, source.file) if loaded else None
    if loaded and known and are_blobs_of(files, loaded.find(known).expected):
        return known
    quant = quantization_of(source.file)
    alike = [file for file in models_among(snapshot) if quantization_of(file) == quant]
    if quant and alike == [source.file]:
        return str(HubSource(source.repository, quantization=quant, revision=source.revision))
    return str(source)


def are_blobs_of(files: Sequence[Path], expected: Sequence[Expected]) -> bool:
    """Return whether these files are blobs whose names match the expected digests. Unknown digests match any blob."""
    wanted = [file.sha256 for file in expected]
    names = [os.path.basename(os.path.realpath(path)) for path in files]  # noqa: PTH119
    return len(wanted) == len(names) and all(sha256 in (None, name) for sha256, name in zip(wanted, names, strict=True))


def sound_catalogue() -> Catalog | None:
    """Return the catalogue, or None if the user's part is invalid, so that models can still be listed."""
    from llmrun.hub.catalog import load_catalog

    try:
        return load_catalog()
    except LlmrunError:
        return None


def _named(own: Sequence[OwnModel], taken: Collection[str]) -> Iterator[Model]:
    """Yield the models in our own folder, except those in folders of a single model.

    A model is named by its catalogue name if the file is from PyPI, or else by its file, or by its path if the name of
    the file would mean something else.
    """
    from llmrun.hub.resolve.model_file import is_bare

    seen: set[str] = set()
    for each in own:
        first, record = each.files[0], read_record(each.files[0])
        name = each.name if each.key not in seen and is_bare(each.name) else str(first)
        seen.add(each.key)
        if record and record.source.startswith("pypi:") and Path(record.files[0].path) == first.absolute():
            name = name if record.name.lower() in taken else record.name
        if model := _model(name, OWN, each.files, record):
            yield model


def _of_single_folders() -> Iterator[Model]:
    """Yield the models from URLs and from other machines. Models are named by their records or paths."""
    for folder in places.single_model_folders():
        present = {entry.name: Path(entry.path) for entry in entries(folder) if is_file(entry)}
        for names in models_among(present).values():
            files = tuple(present[name] for name in names)
            record = read_record(files[0])
            called = record.name if record and _finds_it_again(record) else ""
            if model := _model(called or str(files[0]), OWN, files, record):
                yield model


def _finds_it_again(record: ModelRecord) -> bool:
    """Return whether a record's name is enough to find its file.

    The name of a signed URL is not enough, because names omit the query.
    """
    first = Path(record.files[0].path)
    return record.source == record.name and places.web_file(record.source, first.name) == first


def _held(holder: str, name: str, path: Path) -> Model | None:
    source = HeldSource(holder, name)
    try:
        for part in name.split(":"):
            safe_segments(part)
    except UsageError:  # users cannot enter the record's name, so the path is used
        return _model(str(path), holder, model_files(path), read_record(path), source)
    return _model(str(source), holder, model_files(path), read_record(path), source)


def _model(
    name: str,
    holder: str,
    files: tuple[Path, ...],
    record: ModelRecord | None,
    source: HubSource | HeldSource | None = None,
    commits: tuple[str, ...] = (),
    current: bool = True,
) -> Model | None:
    """Return the model, or None if one of its files was deleted in the meantime."""
    try:
        statuses = [path.stat() for path in files]
    except OSError:
        return None
    size, modified = sum(status.st_size for status in statuses), statuses[0].st_mtime
    return Model(name, holder, files, size, modified, record, source, commits, current)
