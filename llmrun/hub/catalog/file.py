"""Catalogue entries, and parsing models.toml key by key, so that every error can name the file, the entry and the key.

`Wanted` is what any model name stands for, also those that are not in the catalogue: its sources and expected files.

The top of models.toml documents the keys. The file that ships with llmrun has hundreds of entries, but a run
needs only one of them, so entries are parsed on demand. A test parses all of them. The user's own file is always parsed
completely.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmrun.base.errors import UsageError, shown
from llmrun.hub.names import (
    SHA256,
    Expected,
    HubSource,
    PypiSource,
    Source,
    UrlSource,
    bits_in_file,
    quantization_named,
    safe_segments,
    shards_of,
    weights_in,
)
from llmrun.options.presets import TABLE as PRESETS
from llmrun.options.presets import read_toml
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import RULES

QUOTED_SIZE = re.compile(r"(?P<number>[0-9]{1,5}(\.[0-9]{1,2})?) (?P<unit>[KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes


@dataclass(frozen=True, slots=True)
class Quant:
    """One quantization of a model, in one file or in shards.

    files    the known metadata of each file; an unknown size or sha256 is None
    sources  where the files can be found, in order of preference
    about    the rounded size that the source publishes, such as "2.3 GiB"; "" if unknown or if `size` is known
    """

    name: str  # "Q4_K_M"
    files: tuple[Expected, ...]
    sources: tuple[Source, ...]
    about: str = ""

    @property
    def size(self) -> int | None:
        """The total size of all files in bytes, or None if any size is unknown."""
        sizes = [file.size for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def estimated_size(self) -> int | None:
        """The exact size in bytes if known, else the rounded size (accurate to a few percent), else None."""
        if self.size is not None or not self.about:
            return self.size
        match = QUOTED_SIZE.fullmatch(self.about)
        assert match is not None
        return round(float(match["number"]) * _UNITS[match["unit"]])


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model in the catalogue, with its quantizations.

    name         the family and the model within it, such as "qwen3:4b"
    parameters   the number of weights; None if unknown
    context      the context length that the model was trained for, in tokens; None if unknown
    quants       the quantizations, keyed by name, in the order of models.toml
    default      the quantization to use if the user names none
    sampling     recommended sampling parameters, keyed by the names in SamplingParams
    end_of_turn  text of the tokens that end an answer; () if only the GGUF file defines them
    thinking     the tags around the model's thinking; () if the model does not think; None if unknown
    seen         where and when the metadata of the files was looked up
    """

    name: str
    description: str
    license: str
    quants: Mapping[str, Quant]
    default: str
    parameters: int | None = None
    context: int | None = None
    sampling: Mapping[str, float | str] = field(default_factory=dict)
    end_of_turn: tuple[str, ...] = ()
    thinking: tuple[str, str] | tuple[()] | None = None
    aliases: tuple[str, ...] = ()
    seen: str = ""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def estimated_size(self) -> int | None:
        """The size in bytes of the default quantization, as stated or implied by the catalogue, or None."""
        usual, weights = self.quants[self.default], self.parameters or weights_in(self.name)
        return usual.estimated_size or (round(weights * bits_in_file(usual.name) / 8) if weights else None)

    def name_with(self, quant: str) -> str:
        """Return the full name of a quantization: "qwen3:4b" for the default, or "qwen3:4b-q8_0"."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that the user asked for.

    name      the name to show in messages, such as "qwen3:4b-q8_0", "hf:owner/name:Q5_K_M" or a URL
    sources   where the model can be found, in order of preference
    expected  the model's files, one per shard, according to the catalogue; () if only a server can list them
    entry     the model's entry in the catalogue, or None
    is_exact  whether the name specifies a quantization; only set for models in the catalogue
    """

    name: str
    sources: tuple[Source, ...]
    expected: tuple[Expected, ...] = ()
    entry: CatalogEntry | None = None
    is_exact: bool = field(default=False, compare=False)


NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-z0-9._-]*)?")
_FAMILY = re.compile(r"[a-z0-9][a-z0-9._-]*")
WHEEL = re.compile(r"(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[0-9][A-Za-z0-9.!+_-]*)")
_URL = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/[!-~]*?(?P<file>[^/]+\.gguf)")
_LONGEST_TEXT = 500  # characters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """The tables of one models.toml file. Their entries have not been parsed yet.

    aliases       alias -> model name
    repositories  repository on the Hub -> names of the models that have files in it
    presets       the names of the user's presets, which options/presets.py reads
    """

    path: Path
    models: Mapping[str, Any]
    families: Mapping[str, Any]
    shortnames: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, list[str]] = field(default_factory=dict)
    presets: Collection[str] = ()


def read_file(path: Path) -> CatalogFile:
    """Read the tables of a models.toml file. Raises UsageError for invalid TOML and for unknown tables."""
    tables = read_toml(path, "catalogue")
    known = ("models", "families", "shortnames")
    for name, table in tables.items():
        if name not in (*known, PRESETS) or not isinstance(table, dict):
            raise UsageError(
                f"catalogue: {path}: {name!r}: only [models.NAME], [families.NAME], [shortnames] and [presets.NAME] "
                "are allowed"
            )
    models, families, shortnames = (tables.get(name, {}) for name in known)
    return CatalogFile(path, models, families, shortnames, presets=tuple(tables.get(PRESETS, {})))


def read_shortnames(file: CatalogFile) -> dict[str, str]:
    """Return a map from lower-case short names to model names."""
    shortnames = {}
    for name, target in file.shortnames.items():
        if not isinstance(target, str) or not target or not target.isprintable():
            raise UsageError(f"catalogue: {file.path}: shortnames: {name!r}: {target!r} is not the name of a model")
        shortnames[name.lower()] = target
    return shortnames


class TableKeys:
    """A reader for the keys of one TOML table. Reading a key removes it, so `finish` can reject the remaining ones.

    Errors begin with `where`, usually a file, and the `name` of the table.
    """

    def __init__(self, where: str, name: str, table: object) -> None:
        self.where, self.name = where, name
        if not isinstance(table, dict):
            raise UsageError(f"{where}: {name}: {table!r:.100} is not a table")
        self.left: dict[str, Any] = dict(table)

    def refusal(self, key: str, words: str) -> UsageError:
        return UsageError(f"{self.where}: {self.name}: {shown(key)}: {words}")

    def wrong(self, key: str, value: object, rule: str) -> UsageError:
        return self.refusal(key, f"{value!r:.100} is not {rule}")

    def take(self, key: str, kind: type[T], rule: str) -> T:
        if key not in self.left:
            raise self.refusal(key, "missing")
        value = self.left.pop(key)
        if type(value) is not kind:
            raise self.wrong(key, value, rule)
        return value

    def line(self, key: str) -> str:
        rule = "one line of text"
        value = self.take(key, str, rule)
        if not value or not value.isprintable() or len(value) > _LONGEST_TEXT:
            raise self.wrong(key, value, rule)
        return value

    def matched(self, key: str, pattern: re.Pattern[str], rule: str) -> re.Match[str]:
        value = self.take(key, str, rule)
        match = pattern.fullmatch(value)
        if match is None:
            raise self.wrong(key, value, rule)
        return match

    def count(self, key: str) -> int:
        rule = "an integer of at least 1"
        value = self.take(key, int, rule)
        if value < 1:
            raise self.wrong(key, value, rule)
        return value

    def lines(self, key: str, rule: str) -> list[str]:
        values = self.take(key, list, rule)
        for value in values:
            if not isinstance(value, str) or not value or not value.isprintable():
                raise self.wrong(key, value, rule)
        return values

    def path_inside(self, key: str, rule: str) -> str:
        value = self.take(key, str, rule)
        try:
            safe_segments(value)
        except UsageError:
            raise self.wrong(key, value, rule) from None
        return value

    def repository(self) -> str:
        rule = "owner/name"
        value = self.path_inside("repository", rule)
        if value.count("/") != 1:
            raise self.wrong("repository", value, rule)
        return value

    def finish(self) -> None:
        for key in self.left:
            raise self.refusal(key, "no such key")


def read_family(path: Path, name: str, table: object) -> dict[str, Any]:
    """Return the values that all models of a family share, keyed by field names of CatalogEntry, plus `usual`."""
    keys = TableKeys(f"catalogue: {path}", f"families.{name}", table)
    if not _FAMILY.fullmatch(name):
        raise keys.wrong("name", name, "lower-case letters, digits, . _ -")
    facts = _shared_facts(keys)
    if "usual" in keys.left:
        facts["usual"] = keys.matched("usual", _FAMILY, "the part after the : in a model's name")[0]
    keys.finish()
    return facts


def read_entry(path: Path, name: str, table: object, family: Mapping[str, Any]) -> CatalogEntry:
    """Parse the entry of one model. Raises UsageError with the file, the entry and the key.

    family  the result of `read_family`
    """
    keys = TableKeys(f"catalogue: {path}", name, table)
    if not NAME.fullmatch(name):
        raise keys.wrong("name", name, "lower-case letters, digits, . _ - and at most one :")
    facts = {key: value for key, value in family.items() if key != "usual"} | _shared_facts(keys)
    if "license" not in facts:
        raise keys.refusal("license", "missing")
    if "parameters" in keys.left:
        facts["parameters"] = keys.count("parameters")
    if "seen" in keys.left:
        facts["seen"] = keys.line("seen")
    repository = keys.repository() if "repository" in keys.left else None
    quants = _quants(keys, repository)
    entry = CatalogEntry(
        name=name,
        description=keys.line("description"),
        quants=quants,
        default=_default(keys, quants),
        aliases=_aliases(keys),
        **facts,
    )
    keys.finish()
    return entry


def _shared_facts(keys: TableKeys) -> dict[str, Any]:
    """Return the values of the keys that both families and models may have."""
    facts: dict[str, Any] = {}
    if "license" in keys.left:
        facts["license"] = keys.line("license")
    if "context" in keys.left:
        facts["context"] = keys.count("context")
    if "sampling" in keys.left:
        facts["sampling"] = _sampling(keys)
    if "end_of_turn" in keys.left:
        facts["end_of_turn"] = tuple(keys.lines("end_of_turn", "a list of tokens, as text"))
    if "thinking" in keys.left:
        rule = "a list of two tags, or []"
        tags = keys.lines("thinking", rule)
        if len(tags) not in (0, 2):
            raise keys.wrong("thinking", tags, rule)
        facts["thinking"] = (tags[0], tags[1]) if tags else ()
    return facts


def _sampling(keys: TableKeys) -> Mapping[str, float | str]:
    values: dict[str, Any] = keys.take("sampling", dict, "a table of sampling defaults")
    for key, value in values.items():
        if key not in SAMPLING:
            raise keys.refusal(f"sampling.{key}", "no such key")
        try:
            RULES[key].check(value)
        except ValueError:
            raise keys.wrong(f"sampling.{key}", value, RULES[key].words) from None
    return values


def _aliases(keys: TableKeys) -> tuple[str, ...]:
    if "aliases" not in keys.left:
        return ()
    aliases = keys.lines("aliases", "a list of names")
    for alias in aliases:
        if not NAME.fullmatch(alias):
            raise keys.wrong("aliases", alias, "a name")
    return tuple(aliases)


def _default(keys: TableKeys, quants: Mapping[str, Quant]) -> str:
    if "default" in keys.left:
        default = keys.line("default")
        if default not in quants:
            raise keys.wrong("default", default, "one of " + ", ".join(quants))
        return default
    if len(quants) > 1 and "Q4_K_M" not in quants:
        raise keys.refusal("default", "missing, and there is no Q4_K_M")
    return "Q4_K_M" if "Q4_K_M" in quants else next(iter(quants))


def _quants(keys: TableKeys, repository: str | None) -> dict[str, Quant]:
    tables: dict[str, Any] = keys.take("quants", dict, "a table for each quantization")
    if not tables:
        raise keys.refusal("quants", "empty")
    return {name: _quant(keys, name, table, repository) for name, table in tables.items()}


def _quant(entry: TableKeys, name: str, table: object, repository: str | None) -> Quant:
    keys = TableKeys(entry.where, f"{entry.name}: quants.{name}", table)
    if quantization_named(name) != name:
        raise keys.wrong("name", name, "a quantization as in file names: Q4_K_M, IQ4_XS, MXFP4, F16")
    first: Source
    if "url" in keys.left:
        url = keys.matched("url", _URL, "https://.../name.gguf")
        first, file = UrlSource(url[0]), url["file"]
    else:
        file = _gguf_file(keys)
        if "repository" in keys.left:
            repository = keys.repository()
        if repository is None:
            raise keys.refusal("repository", "missing both here and in the entry")
        first = HubSource(repository, file)
    sources: list[Source] = [first]
    if "pypi" in keys.left:
        wheel = keys.matched("pypi", WHEEL, "project==version")
        sources.append(PypiSource(wheel["project"], wheel["version"], keys.count("wheel_bytes")))
    about = keys.matched("about", QUOTED_SIZE, "a size such as 2.3 GiB")[0] if "about" in keys.left else ""
    quant = Quant(name, _expected(keys, file), tuple(sources), about)
    keys.finish()
    return quant


def _gguf_file(keys: TableKeys) -> str:
    rule = "a path in the repository that ends in .gguf (for a sharded model, the first shard)"
    file = keys.path_inside("file", rule)
    try:
        shards_of(file)
    except ValueError:
        raise keys.wrong("file", file, rule) from None
    if not file.lower().endswith(".gguf"):
        raise keys.wrong("file", file, rule)
    return file


def _expected(keys: TableKeys, file: str) -> tuple[Expected, ...]:
    """Return the files with their sizes and digests, if given. Each key has one value or a list with one per shard."""
    names = [path.rsplit("/", 1)[-1] for path in shards_of(file)]
    sizes: list[int | None] = [None] * len(names)
    digests: list[str | None] = [None] * len(names)
    if "size" in keys.left:
        sizes = [*_one_for_each(keys, "size", len(names), int, lambda size: size > 0, "an integer of at least 1")]
    if "sha256" in keys.left:
        rule = "64 lower-case hexadecimal digits"
        digests = [*_one_for_each(keys, "sha256", len(names), str, lambda d: bool(SHA256.fullmatch(d)), rule)]
    return tuple(Expected(*facts) for facts in zip(names, sizes, digests, strict=True))


def _one_for_each(keys: TableKeys, key: str, count: int, kind: type[T], holds: Any, rule: str) -> list[T]:
    value = keys.left.pop(key)
    values = value if isinstance(value, list) else [value]
    if len(values) != count:
        raise keys.refusal(key, f"{len(values)} given, {count} expected")
    for one in values:
        if type(one) is not kind or not holds(one):
            raise keys.wrong(key, one, rule)
    return values
