"""Lists the models in a repository. Shards are grouped, and companion files such as mmproj are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

from llmrun.base.errors import UsageError
from llmrun.hub.names.file_names import is_companion, models_among, quantization_of, safe_segments, without_shard
from llmrun.hub.names.model_sources import RemoteFile

MOST_BYTES = 1 << 50  # 1 PiB; larger sizes are rejected as implausible
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model in a repository, as one file or as shards in order."""

    quantization: str  # from the file name, such as "Q4_K_M"; "" if the name contains no quantization
    files: tuple[RemoteFile, ...]

    @property
    def file(self) -> str:
        """The path of the first file, which identifies the model."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Listing:
    """All models in a repository at one commit.

    models    sorted by name
    left_out  a message with the reason for each GGUF file that was left out
    """

    repository: str
    commit: str
    models: tuple[OfferedModel, ...]
    left_out: tuple[str, ...] = ()


def offered(repository: str, commit: str, files: Iterable[tuple[object, object, object]]) -> Listing:
    """Build a listing from the untrusted (path, size, sha256) of each file, after validating all values."""
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
    left_out += [f"{name!r}: some of its shards are missing" for name in broken]
    return Listing(repository, commit, models, tuple(left_out))


def is_size(value: object) -> TypeGuard[int]:
    """Return whether an untrusted value is a plausible file size in bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_BYTES


def is_sha256(value: object) -> TypeGuard[str]:
    """Return whether an untrusted value is a sha256 in lower-case hexadecimal."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _checked(path: str, size: object, sha256: object) -> RemoteFile | str:
    """Return the validated file, or the reason why it cannot be offered."""
    try:
        safe_segments(path)
    except UsageError:
        return "unsafe file name"
    if not is_size(size):
        return f"invalid size: {_shown(size)} bytes"
    return RemoteFile(path, size, sha256) if is_sha256(sha256) else "the Hub reports no sha256"


def _shown(size: object) -> str:
    if isinstance(size, int) and abs(size) > MOST_BYTES:
        return f"more than {MOST_BYTES:,}"  # repr() raises ValueError for numbers with thousands of digits
    return repr(size)[:40]


def _quantization(path: str) -> str:
    """Return the quantization in the file name or else the folder name, as in Q4_K_M/model-00001-of-00003.gguf."""
    folder = path.rpartition("/")[0]
    return quantization_of(path) or (quantization_of(folder) if folder else "")
