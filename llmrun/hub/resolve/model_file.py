"""Resolves a model's name to a file on this machine, and downloads the file if necessary.

A name is a path, a name in the catalogue, a repository on the Hub, a URL, or a model of Ollama or LM Studio. Parsing a
name never uses the network. Every part of a name that may become part of a path is validated with
`hub.names.safe_segments`.

A `Pull` is the plan for one name: the local copy, or the sources from which the missing files are downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from llmrun.base.errors import IntegrityError, LlmrunError, ModelFileError, ModelNotFound, NetworkError, UsageError
from llmrun.formats.gguf.quantization import quantization_named
from llmrun.formats.gguf.source import FOLDER, NAME_A_FILE, kind_of
from llmrun.hub.catalog import Catalog, Wanted, load_catalog
from llmrun.hub.local import model_records, paths, stored_models
from llmrun.hub.local.own_models import find_own, own_models
from llmrun.hub.local.safe_writes import existing_folder, require_space
from llmrun.hub.names import (
    Artifact,
    Expected,
    HeldSource,
    HubSource,
    Source,
    UrlSource,
    hub_source_of,
    safe_segments,
    shards_of,
    url_source_of,
)
from llmrun.hub.progress_reporter import Reporter, Silent
from llmrun.hub.resolve.offers import Sources, fetch

if TYPE_CHECKING:
    from llmrun.backends.base import OpenOptions
    from llmrun.hub.catalog import CatalogEntry

_LONGEST = 4096  # the maximum number of characters in a name
_MOST_SHORTNAMES = 8  # the maximum length of a chain of short names
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PAGE = re.compile(r"(hf\.co|huggingface\.co)/[^/]+/[^/]+/(blob|resolve)/", re.IGNORECASE)
_HUB = re.compile(r"(?:hf|huggingface):(?://)?|(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_HELD = re.compile(r"(?P<holder>ollama|lmstudio):(?://)?(?P<name>.*)", re.IGNORECASE | re.DOTALL)
_SERVER = re.compile(r"(localhost|\d+(\.\d+){3}|\[.*|[^/#]*:\d{4,5})(?![^:/#])", re.IGNORECASE)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_HUB_FORMS = "use hf:owner/name, hf:owner/name:Q4_K_M or hf:owner/name/file.gguf"


class LocalPath(Struct, frozen=True):
    """A path that the user gave, or a model in our own folder with its `name`. The file may not exist."""

    path: Path
    name: str = ""

    @property
    def title(self) -> str:
        """The name to display."""
        return self.name or self.path.stem


def understand(text: str) -> Wanted | LocalPath:
    """Parse a model name, without network access or slow imports.

    Explicit forms are `hf:owner/name`, `hf:owner/name:Q5_K_M` and `hf:owner/name/folder/file.gguf` (each with an
    optional `@revision`), URLs, `ollama:name:tag` and `lmstudio:path`. Any other text is a short name, the name of a
    model in our own folder, a path if it ends in .gguf or contains a path separator, or else a catalogue name.

    Raises ModelNotFound with a suggestion for unknown names, and UsageError for malformed ones.
    """
    return _understood(text, _MOST_SHORTNAMES)


def on_hub(path: Path) -> str | None:
    """Return the `hf:` name for a missing path that looks like `owner/name[:QUANT][/file.gguf]`, or None.

    Also returns None if the path's first folder exists, because the user has probably misspelled a file name.
    """
    text = f"hf:{path.as_posix()}"
    try:
        if len(path.parts) < 2 or Path(path.parts[0]).exists():
            return None
        _hub(text, path.as_posix())
    except (LlmrunError, OSError, ValueError):
        return None
    return text


def _understood(text: str, left: int) -> Wanted | LocalPath:
    if not text.strip():
        raise UsageError("model: the name is empty", hint="use a name such as smollm2:135m or the path of a .gguf file")
    if len(text) > _LONGEST:
        raise UsageError(f"model: {text[:60]!r}...: {len(text):,} characters, at most {_LONGEST:,} allowed")
    if _PAGE.match(text):  # the user copied a URL from a browser that hides the scheme
        return _url(f"https://{text}", "https")
    if prefix := _HUB.match(text):
        return _hub(text, text[prefix.end() :])
    if held := _HELD.fullmatch(text):
        return _held(text, held["holder"].lower(), held["name"])
    if scheme := _SCHEME.match(text):
        return _url(text, scheme["scheme"].lower())
    if _is_surely_path(text):
        path = _expanded(text)
        return LocalPath(path) if os.path.lexists(path) else _own(text) or LocalPath(path)
    return _name(text, left)


def is_bare(text: str) -> bool:
    """Return whether all commands take a text for a bare name, and not for a path, a server, an option or a list."""
    if not text.isprintable() or text != text.strip() or "," in text or text.startswith("-") or len(text) > _LONGEST:
        return False
    parsed = (_PAGE, _HUB, _HELD, _SCHEME, _SERVER)
    return bool(text) and not _is_surely_path(text) and not any(pattern.match(text) for pattern in parsed)


def _own(text: str) -> LocalPath | None:
    own = find_own(text)
    return LocalPath(own.files[0], own.name) if own else None


def _is_surely_path(text: str) -> bool:
    return text.lower().endswith(".gguf") or text.startswith(("/", "./", "../", "~", "\\")) or bool(_DRIVE.match(text))


def _name(text: str, left: int) -> Wanted | LocalPath:
    """Look up a name in the user's short names, then in our own folder, then in the catalogue."""
    catalog = load_catalog()
    catalog.check(text)
    target = catalog.shortnames.get(text.lower())
    if target is None:
        is_path = any(separator in text for separator in (os.sep, os.altsep) if separator)
        return _own(text) or (LocalPath(_expanded(text)) if is_path else _in_catalogue(text, catalog))
    if left == 0:
        raise UsageError(f"model: {text[:300]!r}: short names refer to one another in a loop")
    return _understood(target, left - 1)


def _in_catalogue(text: str, catalog: Catalog) -> Wanted:
    """Look up a name in the catalogue. The hint for an unknown name prefers a similar name in our own folder."""
    try:
        return catalog.find(text)
    except ModelNotFound as error:
        import difflib

        names = [own.name for own in own_models()]
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.7)
        raise ModelNotFound(str(error), hint=f"did you mean {near[0]}?" if near else error.hint) from None


def _hub(text: str, rest: str) -> Wanted:
    """Parse `owner/name`, followed by an optional `/file.gguf` or `:QUANTIZATION` and an optional `@revision`."""
    rest, _, revision = rest.partition("@")
    path, _, quant = rest.partition(":")
    parts = path.split("/")
    if len(parts) < 2:
        from llmrun.hub.names import hint_for_repository

        near = hint_for_repository(path, load_catalog().repositories())
        raise UsageError(f"model: {text[:300]!r}: not of the form owner/name", hint=near or _HUB_FORMS)
    try:
        for part in (path, *([revision] if "@" in text else [])):
            safe_segments(part)
    except UsageError as error:
        raise UsageError(f"model: {text[:300]!r}: not a valid repository, file or revision", hint=_HUB_FORMS) from error
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    if ":" in rest and file:
        raise UsageError(f"model: {text[:300]!r}: names both a file and a quantization", hint=_HUB_FORMS)
    if ":" in rest and quant.lower() != "latest" and not quantization_named(quant):
        raise UsageError(
            f"model: {text[:300]!r}: {quant[:100]!r} is not a quantization", hint="append for example :Q4_K_M or :Q8_0"
        )
    source = HubSource(repository, file or None, quantization_named(quant) or None, revision or "main")
    return _from_hub(text, source)


def _from_hub(text: str, source: HubSource) -> Wanted:
    if source.file is not None:
        _check_file(text, source.file)
    catalog: Catalog = load_catalog()
    # Keep the catalogue entry but not its sha256, because the user asks for the repository's current file.
    return Wanted(str(source), (source,), entry=catalog.entry_of(source.repository))


def _check_file(text: str, file: str) -> None:
    if not file.lower().endswith(".gguf"):
        raise UsageError(f"model: {text[:300]!r}: {file[:300]!r} does not end in .gguf", hint=_HUB_FORMS)
    try:
        shards_of(file)
    except ValueError as error:
        raise UsageError(f"model: {text[:300]!r}: {error}") from error


def _url(text: str, scheme: str) -> Wanted | LocalPath:
    if scheme == "file":
        return LocalPath(_expanded(text[len("file://") :]))
    if scheme not in ("https", "http"):
        raise UsageError(
            f"model: {text[:300]!r}: models cannot be downloaded from {scheme}:// URLs",
            hint="use hf:owner/name, https://.../file.gguf, ollama:name or lmstudio:path",
        )
    on_hub = hub_source_of(text)
    if on_hub is not None:
        return _from_hub(text, on_hub)
    source, file = url_source_of(text)
    _check_file(text, file)
    return Wanted(source.url.partition("?")[0], (source,), tuple(Expected(shard) for shard in shards_of(file)))


def _held(text: str, holder: str, name: str) -> Wanted:
    """Parse the name of a model that belongs to Ollama (`name:tag`) or LM Studio (a path in its models folder)."""
    path, colon, tag = name.partition(":") if holder == "ollama" else (name, "", "")
    try:
        safe_segments(path)
        if colon:
            safe_segments(tag)
    except UsageError as error:
        forms = {"ollama": "ollama:NAME or ollama:NAME:TAG", "lmstudio": "lmstudio:OWNER/NAME/FILE.gguf"}
        raise UsageError(f"model: {text[:300]!r}: not a valid model name", hint=forms[holder]) from error
    source = HeldSource(holder, name)
    return Wanted(str(source), (source,))


def _expanded(text: str) -> Path:
    try:
        return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises if there is no home folder)
    except ValueError:  # the user name after "~" is invalid; keep the text, and report that the file does not exist
        return Path(text)


_ONLINE = "run once without --offline and with LLMRUN_OFFLINE and HF_HUB_OFFLINE unset"
_CHECK_PATH = "check the path, or use a name such as smollm2:135m"


class ResolvedModel(Struct, frozen=True):
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
    """Return the file for a path or model name, after downloading the model if necessary.

    If `options` name RPC servers, the memory of these servers is added to the memory of this machine.

    For local models, this function sends no network request and makes no slow import. The time of use is recorded.
    Raises ModelNotFound and all errors of a download. With `offline` (or HF_HUB_OFFLINE=1), raises NetworkError instead
    of downloading.
    """
    asked = understand(name)
    if isinstance(asked, LocalPath):
        path = existing(asked)
        if asked.name:
            model_records.mark_used(path)
        return ResolvedModel(path, asked.title, None)
    here = stored_models.find(asked, reporter)
    if here is None:
        refuse_if_offline(asked, offline)
        sources = Sources(asked, reporter)
        here = stored_models.find_copy(_exactly(asked, sources.offer()), reporter)
        if here is None:
            from llmrun.hub.resolve.memory_check import require_memory

            require_memory(sources.offer(), asked, reporter, options)
            here = fetch(sources, reporter)
    model_records.mark_used(here)
    return ResolvedModel(here, asked.name, asked.entry)


def existing(named: LocalPath) -> Path:
    """Return the path that the user gave if it is a regular file.

    Raises ModelFileError for a device or a pipe, and ModelNotFound for a missing file. For paths such as `owner/name`,
    the hint contains the corresponding Hub name.
    """
    path = named.path
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise _dangling(named) from None
        raise ModelNotFound(f"model: {str(path)!r}: no such file", hint=_hint_for_missing(path)) from None
    except (OSError, ValueError) as error:  # the path is too long or contains a NUL byte
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


def _dangling(named: LocalPath) -> ModelNotFound:
    target = os.path.realpath(named.path)
    hint = f"`llmrun rm {named.name}` removes the link; " if named.name else ""
    return ModelNotFound(
        f"model: {named.name or str(named.path)!r}: a link to {target}, which does not exist",
        hint=f"{hint}`llmrun import FILE {named.name or 'NAME'}` links to another file",
    )


def _hint_for_missing(path: Path) -> str:
    meant = on_hub(path)
    return f"did you mean {meant}?" if meant else _CHECK_PATH


def is_offline(offline: bool) -> bool:
    """Return whether the user, or an environment variable that huggingface_hub also honors, forbids network access."""
    hub = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return offline or hub.upper() in {"1", "ON", "YES", "TRUE"}


def refuse_if_offline(wanted: Wanted, offline: bool) -> None:
    """Raise NetworkError in offline mode. The message reports the size of the required download."""
    if not is_offline(offline):
        return
    sizes = [file.size for file in wanted.expected]
    known = sum(size for size in sizes if size is not None) if sizes and None not in sizes else 0
    raise NetworkError(
        f"{wanted.name}: not on this machine{f' ({known:,} bytes to download)' if known else ''}, "
        "and offline mode is on",
        hint=_ONLINE,
    )


class Pull(Struct, frozen=True):
    """A model to pull, with its location on this machine or its sources.

    here       the model's first file; None unless all files are on this machine
    pinned     the model's exact files; None for a local model whose source was not contacted
    sources    the sources to try, in order; None if only `pinned` is acceptable
    projector  the model's vision projector to download or to lock (see projectors.py), or None
    """

    name: str
    wanted: Wanted | None  # None if the user gave a path
    here: Path | None
    pinned: Artifact | None = None
    sources: Sources | None = None
    projector: Artifact | None = None

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
            files.append(structs.replace(file, sha256=sha256))
        projector = None if self.projector is None else self.projector.files[0]
        return structs.replace(artifact, files=tuple(files), projector=projector)


def plan(name: str, reporter: Reporter, *, offline: bool) -> Pull:
    """Plan a pull that accepts a local copy without contacting the model's source.

    Raises the same errors as `resolve`, except those of the download itself.
    """
    wanted = understand(name)
    if isinstance(wanted, LocalPath):
        path = existing(wanted)
        return Pull(wanted.title, None, path)
    here = stored_models.find(wanted, reporter)
    if here is not None:
        return Pull(wanted.name, wanted, here)
    refuse_if_offline(wanted, offline)
    sources = Sources(wanted, reporter)
    copy = stored_models.find_copy(_exactly(wanted, sources.offer()), reporter)
    return Pull(wanted.name, wanted, copy, sources.offer(), sources)


def plan_current(name: str, revision: str | None, reporter: Reporter, *, offline: bool) -> Pull:
    """Plan a pull of the source's current version or the given revision, ignoring local copies of other versions.

    Raises the same errors as `plan`, also for local models, because only the source knows its current version.
    """
    wanted = _fetchable(name)
    if revision is not None:
        wanted = _at_revision(wanted, revision, reporter)
    if is_offline(offline):
        raise NetworkError(f"{wanted.name}: the source cannot be contacted because offline mode is on", hint=_ONLINE)
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
    pinned = structs.replace(held, name=wanted.name, source=_as_named(wanted, held))
    if named is None and here is None:
        refuse_if_offline(exact, offline)
        try:
            Sources(exact, reporter).offer()
        except IntegrityError as error:
            raise IntegrityError(
                str(error), hint=f"the locked files are no longer available; lock the current ones: {again}"
            ) from error
    projector = None if pinned.projector is None else pinned.for_projector(pinned.projector)
    return Pull(wanted.name, wanted, named, pinned, projector=projector)


def require_room(pulls: Sequence[Pull]) -> None:
    """Raise DoesNotFit unless each disk has enough free space for all models that will be downloaded to it."""
    from llmrun.hub.transfer.download import bytes_here

    needed: dict[int, tuple[Path, int, dict[str, None]]] = {}  # device number -> (a folder on it, bytes, models)
    for pull in pulls:
        for artifact in (pull.pinned if pull.here is None else None, pull.projector):
            if artifact is not None:
                folder = existing_folder(_folder_of(artifact))
                disk = folder.stat().st_dev
                _, size, names = needed.get(disk, (folder, 0, {}))
                needed[disk] = (folder, size + artifact.size - bytes_here(artifact), names | {pull.name: None})
    for folder, size, names in needed.values():
        require_space(folder, size, next(iter(names)) if len(names) == 1 else f"{len(names)} models")


def _folder_of(artifact: Artifact) -> Path:
    return paths.hub_cache() if isinstance(artifact.source, HubSource) else paths.models_folder()


def _fetchable(name: str) -> Wanted:
    wanted = understand(name)
    if isinstance(wanted, LocalPath) or any(isinstance(source, HeldSource) for source in wanted.sources):
        raise UsageError(f"{name}: a local file has no source to download from")
    return wanted


def _at_revision(wanted: Wanted, revision: str, reporter: Reporter) -> Wanted:
    safe_segments(revision)
    hub = [source for source in wanted.sources if isinstance(source, HubSource)]
    if not hub:
        raise UsageError(f"--revision: {wanted.name} does not come from a repository of the Hub")
    if hub[0].revision not in ("main", revision):
        raise UsageError(f"--revision: {revision} contradicts the name, which specifies {hub[0].revision}")
    sources = tuple(structs.replace(source, revision=revision) for source in hub)
    if wanted.expected:
        reporter.note(
            f"{wanted.name}: --revision ignores the catalogue's sha256; run the downloaded model as {sources[0]}"
        )
    return structs.replace(wanted, name=str(sources[0]), sources=sources, expected=())


def _exactly(wanted: Wanted, pinned: Artifact) -> Wanted:
    """Return the same request, pinned to one commit and to the sizes and digests of its files."""
    source = pinned.source
    if isinstance(source, HubSource):
        source = structs.replace(source, revision=pinned.commit)
    expected = tuple(Expected(file.path.rpartition("/")[2], file.size, file.sha256) for file in pinned.files)
    return structs.replace(wanted, sources=(source,), expected=expected)


def _as_named(wanted: Wanted, held: Artifact) -> Source:
    """Return the source in the lock file, with the requested name's branch instead of the commit.

    The download then points the local branch to the locked commit, so the name also resolves to this commit later.
    """
    source = held.source
    if isinstance(source, HubSource):
        for named in wanted.sources:
            if isinstance(named, HubSource) and named.repository == source.repository:
                return structs.replace(source, revision=named.revision)
    return source


def _refuse_another_meaning(wanted: Wanted, held: Artifact, again: str) -> None:
    """Raise IntegrityError if the name no longer refers to the locked model.

    If the catalogue contains the sha256 of all files, these digests must equal those in the lock file. If the catalogue
    lacks a digest, the sources must match the lock file.
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
