"""Parses the quantization and the shard numbers in file names, and checks that names are safe to write to disk."""

from __future__ import annotations

import re
from collections.abc import Collection

from llmrun.base.errors import UsageError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MOST_SHARDS = 1000
# "UD-" is Unsloth's prefix for a mix of quantization types. It is part of the name. The pattern matches only whole
# words, so it does not find "Q4_XS" in "IQ4_XS".
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*")  # excludes "..", hidden files and control characters
_MOST_SEGMENT = 200  # characters; file systems allow 255 bytes, and we append suffixes
_MOST_SEGMENTS = 8
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))})


def quantization_of(file: str) -> str:
    """Return the quantization in a file name in upper case, such as "Q4_K_M" or "UD-Q4_K_XL".

    Returns the last quantization if the name contains several, and "" if it contains none.
    """
    stem = file.rsplit("/", 1)[-1]
    found = [match["name"] for match in _QUANTIZATION.finditer(stem)]
    return _plain(found[-1]) if found else ""


def quantization_named(text: str) -> str:
    """Return `text` in upper case if it names a quantization ("q4_k_m" -> "Q4_K_M"), or else ""."""
    return _plain(text) if _QUANTIZATION.fullmatch(text) else ""


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


def models_among(files: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Group files by model. Returns a map from each model's first file to all its files in order.

    Models with missing shards and companion files are left out. Names may contain folders.
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


def _plain(quantization: str) -> str:
    name = quantization.upper()
    return {"FP16": "F16", "FP32": "F32"}.get(name, name)
