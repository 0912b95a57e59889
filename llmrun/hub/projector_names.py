"""Decides by name which vision projectors (mmproj files) belong to a model.

Publishers name projectors in these ways:

    mmproj-<model>-F16.gguf, mmproj-<owner>_<model>-f16.gguf     ggml-org, bartowski, llama.cpp's converter
    <model>-BF16-mmproj.gguf, <model>.mmproj-Q8_0.gguf           mistralai, mradermacher
    mmproj-F16.gguf, mmproj-model-f16.gguf                       unsloth, lmstudio-community: without the model's name
    mmproj-model-f16-12B.gguf                                    google: with the model's size

A projector that another model of the folder matches better belongs to that model. The header of the chosen file must be
checked before use, because names can be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from msgspec import Struct

from llmrun.formats.gguf.quantization import quantization_of, without_quantizations
from llmrun.hub.names import is_projector, models_among, without_shard

# Q8_0 is half as large as F16, without measurable loss. Most processors compute with F16 faster than with BF16.
_PREFERRED: Final = ("Q8_0", "F16", "BF16", "F32")
_WORD: Final = re.compile(r"[^\W_]+")
_SIZE: Final = re.compile(r"\d+[bm]")
_NOT_NAMES: Final = frozenset({"model", "gguf", "i1", "imat", "imatrix"})  # these words do not tell models apart
_SAME, _PART, _NAMELESS = range(3)


class Choice(Struct, frozen=True):
    """A projector that may belong to a model, in one or more precisions.

    files       the same projector in different precisions, the preferred one first
    is_certain  False if several models could have the projector, because its name contains no name of a model
    """

    files: tuple[str, ...]
    is_certain: bool


def choices(model: str, files: Collection[str]) -> list[Choice]:
    """Return the projectors that match a model best, by name. If several match equally well, the user must choose.

    model  the model's first file
    files  all files of its folder or repository, with "/" in paths
    """
    name = _words(model)
    others = [words for words in {_words(first) for first in models_among(files)} if words != name]
    found: dict[tuple[int, int, str], list[str]] = {}
    for file in files:
        if not is_projector(file):
            continue
        words = _words(file)
        rank = _rank(words, name)
        if rank is None or (rank != _NAMELESS and any(_is_better(words, other, rank) for other in others)):
            continue
        found.setdefault((rank, _distance(model, file), "".join(words)), []).append(file)
    best = min((key[:2] for key in found), default=None)
    return [
        Choice(tuple(sorted(names, key=_preference)), key[0] != _NAMELESS or not others)
        for key, names in sorted(found.items())
        if key[:2] == best
    ]


def only_of(model: str, files: Collection[str]) -> list[str]:
    """Return the projectors of a model, in all precisions, that match none of the other models among the files."""
    others = [first for first in models_among(files) if first != model]
    shared = {file for other in others for one in choices(other, files) for file in one.files}
    return [file for one in choices(model, files) for file in one.files if file not in shared]


def _words(file: str) -> tuple[str, ...]:
    """Return the words of a name: "mmproj-google_gemma-3-4b-it-f16.gguf" -> ("google", "gemma", "3", "4b", "it")."""
    stem = without_quantizations(without_shard(file).rsplit("/", 1)[-1]).lower().replace("mmproj", " ")
    return tuple(word for word in _WORD.findall(stem) if word not in _NOT_NAMES)


def _rank(projector: tuple[str, ...], model: tuple[str, ...]) -> int | None:
    """Return how well two names match, the best being _SAME, or None if they are the names of different models."""
    if all(map(_SIZE.fullmatch, projector)):
        return _NAMELESS if set(projector) <= set(model) else None
    if "".join(projector) == "".join(model):  # "Qwen3VL-2B" and "Qwen3-VL-2B"
        return _SAME
    return _PART if _is_part(projector, model) or _is_part(model, projector) else None


def _is_better(projector: tuple[str, ...], other: tuple[str, ...], rank: int) -> bool:
    there = _rank(projector, other)
    return there is not None and there < rank


def _is_part(part: tuple[str, ...], whole: tuple[str, ...]) -> bool:
    starts = range(len(whole) - len(part) + 1)
    return bool(part) and any(whole[start : start + len(part)] == part for start in starts)


def _distance(model: str, file: str) -> int:
    """Return how far the folder of a file is from the model's folder. Folders above come before other folders."""
    here, there = model.split("/")[:-1], file.split("/")[:-1]
    return len(here) - len(there) if here[: len(there)] == there else 100 + len(there)


def _preference(file: str) -> tuple[int, str]:
    quantization = quantization_of(file)
    rank = _PREFERRED.index(quantization) if quantization in _PREFERRED else len(_PREFERRED)
    return rank, file
