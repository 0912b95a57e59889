"""What a model file's name says: its quantization, which shard of how many it is, and whether it is safe to write."""

from __future__ import annotations

import re
from collections.abc import Collection

from llmrun.errors import UsageError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MOST_SHARDS = 1000
# "UD-" is unsloth's mark of a mix of types; it is part of the name. Not inside a word: "IQ4_XS" has no "Q4_XS".
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(?P<name>(?:UD-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*")  # never "..", never hidden, no control characters
_MOST_SEGMENT = 200  # characters; file systems take 255 bytes, and suffixes are added
_MOST_SEGMENTS = 8
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))})


def quantization_of(file: str) -> str:
    """As the name has it, upper case: "Q4_K_M", "UD-Q4_K_XL", "F16"; "" where it says none. The last one counts."""
    stem = file.rsplit("/", 1)[-1]
    found = [match["name"] for match in _QUANTIZATION.finditer(stem)]
    return _plain(found[-1]) if found else ""


def quantization_named(text: str) -> str:
    """The same of a text that is nothing else: "q4_k_m" is "Q4_K_M"; "" for any other text."""
    return _plain(text) if _QUANTIZATION.fullmatch(text) else ""


def shards_of(file: str) -> tuple[str, ...]:
    """All files of the model that `file` is the first of, in order: itself alone, or `-00001-of-00003` and the rest.

    Raises ValueError for a shard that is not the first, and for numbers that cannot be.
    """
    match = _SHARD.fullmatch(file)
    if match is None:
        return (file,)
    number, count = int(match["number"]), int(match["count"])
    if number != 1 or not 1 <= count <= _MOST_SHARDS:
        raise ValueError(f"{file}: shard {number} of {count}: a model is named by its first shard")
    ending = file[-len(".gguf") :]
    return tuple(f"{match['stem']}-{index:05}-of-{count:05}{ending}" for index in range(1, count + 1))


def without_shard(file: str) -> str:
    """The name as it would be in one piece: "big-00001-of-00003.gguf" is "big.gguf"."""
    match = _SHARD.fullmatch(file)
    return f"{match['stem']}.gguf" if match else file


def first_shard(file: str) -> str:
    """The first shard's name of the model that `file` is a shard of; a file in one piece is its own."""
    match = _SHARD.fullmatch(file)
    return f"{match['stem']}-{1:05}-of-{match['count']}{file[-len('.gguf') :]}" if match else file


def is_companion(file: str) -> bool:
    """Whether a file goes with a model and is none: the eyes of one that sees, or what a quantization was tuned by."""
    stem = file.rsplit("/", 1)[-1].lower()
    return "mmproj" in stem or ("imatrix" in stem and not quantization_of(stem))  # "x-imatrix-Q4_K_M" is a model


def models_among(files: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Which of these files (with or without folders) are models, and all files of each, in order. A model that misses a
    shard is left out, and so is what only goes with one.
    """
    present = frozenset(files)
    found = {}
    for file in sorted(present):
        if not file.lower().endswith(".gguf") or is_companion(file):
            continue
        try:
            shards = shards_of(file)
        except ValueError:
            continue  # not the first shard, or numbers that nobody means
        if present.issuperset(shards):
            found[file] = shards
    return found


def safe_segments(path: str) -> tuple[str, ...]:
    """The parts between "/", each a name that is the same on every system. Raises UsageError for any other."""
    segments = tuple(path.split("/"))
    for segment in segments:
        plain = _SEGMENT.fullmatch(segment) and len(segment) <= _MOST_SEGMENT and not segment.endswith((".", " "))
        if not plain or segment.split(".")[0].lower() in _RESERVED or len(segments) > _MOST_SEGMENTS:
            raise UsageError(f"file name: {path[:300]!r}: not one that is safe to write")
    return segments


def _plain(quantization: str) -> str:
    name = quantization.upper()
    return {"FP16": "F16", "FP32": "F32"}.get(name, name)
