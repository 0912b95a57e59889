"""Sorts the names of models and quantizations by size instead of alphabetically."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

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
    """Return the size in a model's name as a sort key, such as 4e9 for "gemma3n:e4b", or inf if there is none."""
    match = _match(name)
    return _number(match) if match else math.inf


def _match(name: str) -> re.Match[str] | None:
    return _WEIGHTS.search(name.lower().partition(":")[2] or name.lower())


def _number(match: re.Match[str]) -> float:
    return int(match["experts"] or 1) * float(match["number"]) * _UNITS[match["unit"]]


def nearest_in_size(name: str, names: Iterable[str]) -> list[str]:
    """Sort model names by how close their sizes are to that of `name`, the closest first."""
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


def fewest_bits_first(quantizations: Iterable[str]) -> list[str]:
    """Sort quantizations by bits per weight. The sort is stable."""
    return sorted(quantizations, key=bits_of)


def nearest_in_bits(wanted: str, quantizations: Iterable[str]) -> list[str]:
    """Sort quantizations by how close their bits per weight are to those of `wanted`, the closest first."""
    return sorted(fewest_bits_first(quantizations), key=lambda name: abs(bits_of(name) - bits_of(wanted)))
