"""Which models a repository offers: its GGUF files, the shards of one together, without what is no model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

from llmrun.errors import UsageError
from llmrun.hub.names.file_names import is_companion, models_among, quantization_of, safe_segments, without_shard
from llmrun.hub.names.model_sources import RemoteFile

MOST_BYTES = 1 << 50  # no file is larger: a petabyte
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """One model of a repository: a file, or its shards in order."""

    quantization: str  # as the name has it: "Q4_K_M"; "" where it says none
    files: tuple[RemoteFile, ...]

    @property
    def file(self) -> str:
        """What names it: the path of the first file."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Listing:
    """All models of a repository at one commit.

    models    in the order of their names
    left_out  a line for each GGUF file that cannot be offered, with the reason
    """

    repository: str
    commit: str
    models: tuple[OfferedModel, ...]
    left_out: tuple[str, ...] = ()


def offered(repository: str, commit: str, files: Iterable[tuple[object, object, object]]) -> Listing:
    """The listing of (path, size, sha256) as a server told them: nothing of it is believed unseen."""
    sound: dict[str, RemoteFile] = {}
    left_out = []
    for path, size, sha256 in files:
        if not isinstance(path, str) or not path.lower().endswith(".gguf") or is_companion(path):
            continue
        file = _checked(path, size, sha256)
        if isinstance(file, RemoteFile):
            sound[path] = file
        else:
            left_out.append(f"{path[:200]!r}: {file}")
    models = tuple(
        OfferedModel(_quantization(first), tuple(sound[part] for part in parts))
        for first, parts in models_among(sound).items()
    )
    whole = {file.path for model in models for file in model.files}
    broken = sorted({without_shard(path) for path in sound if path not in whole})
    left_out += [f"{name!r}: not all of its shards are there" for name in broken]
    return Listing(repository, commit, models, tuple(left_out))


def is_size(value: object) -> TypeGuard[int]:
    """Whether a server can mean this as the size of a file."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_BYTES


def is_sha256(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _checked(path: str, size: object, sha256: object) -> RemoteFile | str:
    """The file, or the reason why it cannot be offered."""
    try:
        safe_segments(path)
    except UsageError:
        return "not a name that is safe to write"
    if not is_size(size):
        return f"a size of {_shown(size)} bytes"
    return RemoteFile(path, size, sha256) if is_sha256(sha256) else "the Hub does not tell its sha256"


def _shown(size: object) -> str:
    if isinstance(size, int) and abs(size) > MOST_BYTES:
        return f"more than {MOST_BYTES:,}"  # Python refuses to write out a number of thousands of digits
    return repr(size)[:40]


def _quantization(path: str) -> str:
    """Of the file's name, or of the folder's: big models are kept as Q4_K_M/model-00001-of-00003.gguf."""
    folder = path.rpartition("/")[0]
    return quantization_of(path) or (quantization_of(folder) if folder else "")
