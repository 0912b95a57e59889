"""Looks up models in the catalogue by name.

A name refers to a family (`qwen3`, short for its usual model), a model (`qwen3:4b`, short for its default
quantization) or a quantization (`qwen3:4b-q8_0`). Case does not matter. The names come from the models.toml that ships
with llmrun and from the user's `models.toml`, which is next to `config.toml`. A model in the user's file replaces our
model of the same name, but a family in it overrides only the keys that it lists.

A run usually looks up one name among more than a hundred models. Parsing our whole file takes 23 ms, but splitting it
at its headings takes only 5 ms, so sections are parsed on demand. Splitting works only if every heading is on a line of
its own. This is true of our file, and a test checks that both methods give the same result. The user's file may be any
valid TOML, so it is parsed as a whole.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import llmrun
from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.base.folders import own_models_file
from llmrun.hub.catalog.file import (
    CatalogEntry,
    CatalogFile,
    Quant,
    Wanted,
    read_entry,
    read_family,
    read_file,
    read_shortnames,
)
from llmrun.hub.names import HubSource, bits_of, nearest_in_bits, quantization_named, shards_of

_HEADING = re.compile(r'^\[(models|families)\.(?:"([^"\n]+)"|([A-Za-z0-9_-]+))\]$', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = (\[[^\n]*\])$", re.MULTILINE)
_NAME = re.compile(r'"([^"]*)"')
_REPOSITORY = re.compile(r'\brepository = "([^"]+)"')


class Sections(Mapping[str, Any]):
    """A mapping from table names to tables. Each table is parsed on access."""

    def __init__(self, kind: str, texts: Mapping[str, str]) -> None:
        self._kind, self._texts = kind, texts

    def __getitem__(self, name: str) -> Any:
        import tomllib

        return tomllib.loads(self._texts[name])[self._kind][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def aliases(self) -> dict[str, str]:
        """Return the aliases in all tables: alias -> table name."""
        found: dict[str, str] = {}
        for name, text in self._texts.items():
            for line in _ALIASES.findall(text):
                found |= dict.fromkeys(_NAME.findall(line), name)
        return found

    def repositories(self) -> dict[str, list[str]]:
        """Return the repositories in all tables: repository -> table names."""
        found: dict[str, list[str]] = {}
        for name, text in self._texts.items():
            for repository in dict.fromkeys(_REPOSITORY.findall(text)):
                found.setdefault(repository, []).append(name)
        return found


def read_sections(path: Path) -> CatalogFile:
    text = _read_text(path)
    texts: dict[str, dict[str, str]] = {"models": {}, "families": {}}
    headings = list(_HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        kind, quoted, bare = heading.groups()
        texts[kind][quoted or bare] = text[heading.start() : following.start() if following else len(text)]
    models = Sections("models", texts["models"])
    return CatalogFile(
        path, models, Sections("families", texts["families"]), {}, models.aliases(), models.repositories()
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"catalogue: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"catalogue: {path}: not UTF-8: {error}") from error


_MOST_QUANTS = 4  # the maximum number of quantizations in a hint
# Suffixes that mark instruction-tuned models in Ollama's names, such as "llama3.2:3b-instruct-q4_K_M".
_ANSWERING = ("-instruct", "-it", "-chat", "-text")


class Catalog:
    """A catalogue of models. Entries are parsed on demand.

    shortnames  the user's short names in lower case -> model names
    """

    def __init__(self, *files: CatalogFile) -> None:
        """Merge several files. Later files take precedence."""
        self._models: dict[str, CatalogFile] = {}
        self._families: dict[str, list[CatalogFile]] = {}
        self._aliases: dict[str, str] = {}
        self._repositories: dict[str, list[str]] = {}
        self._entries: dict[str, CatalogEntry] = {}
        self._presets: list[str] = []
        self.shortnames: dict[str, str] = {}
        for file in files:
            self.shortnames |= read_shortnames(file)
            self._presets += file.presets
            self._aliases |= file.aliases
            for alias in file.aliases:
                self._models.pop(alias, None)
            self._models |= dict.fromkeys(file.models, file)
            for repository, names in file.repositories.items():
                self._repositories.setdefault(repository, []).extend(names)
            for name in file.families:
                self._families.setdefault(name, []).append(file)

    def names(self) -> tuple[str, ...]:
        """Return the names of all models, grouped by family."""
        return tuple(self._models)

    def other_names(self) -> tuple[str, ...]:
        """Return the aliases, and the user's short names and presets."""
        return (*self._aliases, *self.shortnames, *self._presets)

    def entry(self, name: str) -> CatalogEntry:
        """Return the model with exactly this name. Raises KeyError if none exists, or UsageError if it is invalid."""
        if name not in self._entries:
            file = self._models[name]
            self._entries[name] = read_entry(file.path, name, file.models[name], self._family(name.partition(":")[0]))
        return self._entries[name]

    def entries(self) -> Iterator[CatalogEntry]:
        """Yield all models. Parsing them takes 40 ms."""
        return (self.entry(name) for name in self._models)

    def sizes(self, family: str) -> tuple[str, ...]:
        """Return the names of a family's models."""
        return tuple(name for name in self._models if name.partition(":")[0] == family)

    def find(self, name: str) -> Wanted:
        """Resolve a name. Raises ModelNotFound with a hint that suggests similar names or other quantizations."""
        entry, named = self._chosen(name)
        chosen = entry.quants[named or entry.default]
        return Wanted(entry.name_with(chosen.name), chosen.sources, chosen.files, entry, is_exact=named is not None)

    def name_of(self, repository: str, file: str) -> str | None:
        """Return the catalogue's name for a file or shard on the Hub, or None."""
        for entry in self._with_repository(repository):
            for quant in entry.quants.values():
                for source in _hub_sources(quant):
                    if source.repository == repository and file in shards_of(source.file or ""):
                        return entry.name_with(quant.name)
        return None

    def entry_of(self, repository: str) -> CatalogEntry | None:
        """Return the catalogue entry for a repository on the Hub, or None."""
        return next(self._with_repository(repository), None)

    def repositories(self) -> tuple[str, ...]:
        """Return every repository that an entry names, without duplicates."""
        return tuple(self._repositories)

    def _with_repository(self, repository: str) -> Iterator[CatalogEntry]:
        for name in dict.fromkeys(self._repositories.get(repository, ())):
            # In the user's catalogue, this name may have other repositories or may be an alias.
            if name in self._models and repository in _repositories_of(self.entry(name)):
                yield self.entry(name)

    def _chosen(self, name: str) -> tuple[CatalogEntry, str | None]:
        """Return the model that a name refers to, and the quantization in the name, if any."""
        wanted = name.lower()
        found = self._model_named(wanted)
        if found is not None:
            return self.entry(found), None
        for position, letter in enumerate(wanted):
            quant = quantization_named(wanted[position + 1 :]) if letter in "-:" else ""
            found = self._model_named(wanted[:position]) if quant else None
            if found is not None:
                return self._with_quant(name, self.entry(found), quant)
        raise self._not_found(name)

    def _model_named(self, wanted: str) -> str | None:
        """Return the model that a name without a quantization refers to, or None."""
        if wanted in self._models:
            return wanted
        if wanted in self._aliases:
            return self._aliases[wanted]
        family, _, variant = wanted.partition(":")
        if variant in ("", "latest"):
            return self._usual(family)
        for ending in _ANSWERING:
            plain = wanted.removesuffix(ending)
            if plain != wanted and plain in self._models:
                # If `qwen3:4b-instruct` is a separate model, `qwen3:8b-instruct` must not refer to `qwen3:8b`.
                return None if any(name.endswith(ending) for name in self.sizes(family)) else plain
        return None

    def _usual(self, family: str) -> str | None:
        """Return the model that a family's name refers to, or None. Raises ModelNotFound if it is ambiguous."""
        usual = self._family(family).get("usual")
        if usual is not None and f"{family}:{usual}" in self._models:
            return f"{family}:{usual}"
        sizes = self.sizes(family)
        if len(sizes) > 1:
            from llmrun.hub.names import sizes_near

            hint = f"choose one of {sizes_near(family, sizes)}"
            raise ModelNotFound(f"model: {family!r}: the name matches {len(sizes)} models", hint=hint)
        return sizes[0] if sizes else None

    def _family(self, name: str) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for file in self._families.get(name, ()):
            facts |= read_family(file.path, name, file.families[name])
        return facts

    def _with_quant(self, name: str, entry: CatalogEntry, quant: str) -> tuple[CatalogEntry, str]:
        if quant in entry.quants:
            return entry, quant
        near = nearest_in_bits(quant, entry.quants)[:_MOST_QUANTS]
        near.sort(key=lambda name: (bits_of(name), entry.quants[name].estimated_size or 0))
        hint = f"it is available as {', '.join(near)}"
        if len(entry.quants) > _MOST_QUANTS:
            hint += f"; `llmrun fit {entry.name}` lists all {len(entry.quants)}"
        repository = next((source.repository for source in _hub_sources(entry.quants[entry.default])), None)
        if repository:
            hint += f"; its repository may have more: hf:{repository}:{quant}"
        raise ModelNotFound(f"model: {name!r}: the catalogue does not list {quant} for {entry.name}", hint=hint)

    def _not_found(self, name: str) -> ModelNotFound:
        from llmrun.hub.names import hint_for_name

        return ModelNotFound(
            f"model: {name[:300]!r}: neither a model in the catalogue nor a file",
            hint=hint_for_name(name, self.names(), self.other_names()),
        )


def load_catalog() -> Catalog:
    """Return our catalogue merged with the user's. Raises UsageError with the file, the entry and the key."""
    ours, own = _shipped(shipped_catalog()), own_models_file()
    if not own.is_file():
        return Catalog(ours)
    file = read_file(own)
    return Catalog(ours, _indexed(file, read_whole(file)))


def shipped_catalog() -> Path:
    """Return the path of our models.toml, which is inside the package in a wheel and above it in a source tree."""
    package = Path(llmrun.__file__).resolve().parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def read_whole(file: CatalogFile) -> dict[str, CatalogEntry]:
    """Parse every entry of one file. Raises UsageError for invalid entries and for aliases that two models share.

    Models that belong to a family in our own catalogue inherit the family's values.
    """
    shipped = _shipped(shipped_catalog())
    catalog = Catalog(file) if file.path == shipped.path else Catalog(shipped, file)
    for name, table in file.families.items():
        read_family(file.path, name, table)
    entries = {name: catalog.entry(name) for name in file.models}
    owners: dict[str, str] = dict.fromkeys(entries, "")
    for entry in entries.values():
        for alias in entry.aliases:
            if alias in owners:
                raise UsageError(
                    f"catalogue: {file.path}: {entry.name}: aliases: {alias!r} already names another model"
                )
            owners[alias] = entry.name
    return entries


def _indexed(file: CatalogFile, entries: Mapping[str, CatalogEntry]) -> CatalogFile:
    aliases: dict[str, str] = {}
    repositories: dict[str, list[str]] = {}
    for entry in entries.values():
        aliases |= dict.fromkeys(entry.aliases, entry.name)
        for repository in _repositories_of(entry):
            repositories.setdefault(repository, []).append(entry.name)
    return replace(file, aliases=aliases, repositories=repositories)


def _repositories_of(entry: CatalogEntry) -> set[str]:
    return {source.repository for quant in entry.quants.values() for source in _hub_sources(quant)}


def _hub_sources(quant: Quant) -> list[HubSource]:
    return [source for source in quant.sources if isinstance(source, HubSource)]


@functools.cache
def _shipped(path: Path) -> CatalogFile:
    return read_sections(path)
