"""The order in which people expect names of models and of quantizations: by size, not by letter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

# "30b", "0.6b", "270m", "8x7b", "e2b"; not inside a word, so "128k" and "v0.2" are none.
_WEIGHTS = re.compile(
    r"(?<![a-z0-9.])(?P<effective>e?)(?:(?P<experts>\d+)x)?(?P<number>\d+(?:\.\d+)?)(?P<unit>[mbt])(?![a-z0-9])"
)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_BITS = re.compile(r"(?:Q|FP|BF|F)(?P<bits>\d+)")
# In files, scales and a few larger tensors included; measured on 8-billion-weight models.
_BITS_IN_FILES = {1: 2.0, 2: 3.2, 3: 3.95, 4: 4.85, 5: 5.7, 6: 6.6, 8: 8.5}


def weights_in(name: str) -> float | None:
    """Return the number of weights that a model's name says: 4e9 for "qwen3:4b"; None if it says none.

    None also for "gemma3n:e4b": those count only the weights that are used at once.
    """
    match = _match(name)
    return None if match is None or match["effective"] else _number(match)


def smallest_first(names: Iterable[str]) -> list[str]:
    """Sort the names of models by the size that they say. Names that say none come last."""
    return sorted(names, key=lambda name: (size_in(name), name))


def size_in(name: str) -> float:
    """Return the size that a model's name says, to sort by: 4e9 for "qwen3:4b" and "gemma3n:e4b"; inf if none."""
    match = _match(name)
    return _number(match) if match else math.inf


def _match(name: str) -> re.Match[str] | None:
    return _WEIGHTS.search(name.lower().partition(":")[2] or name.lower())


def _number(match: re.Match[str]) -> float:
    return int(match["experts"] or 1) * float(match["number"]) * _UNITS[match["unit"]]


def nearest_in_size(name: str, names: Iterable[str]) -> list[str]:
    """Sort the names of models by how far their size is from that of `name`, the nearest first."""
    wanted, ordered = size_in(name), smallest_first(names)
    if wanted in (0, math.inf):
        return ordered
    return sorted(ordered, key=lambda other: abs(math.log((size_in(other) or 1) / wanted)))


def bits_of(quantization: str) -> int:
    """Return the bits a weight that the name of a quantization says: 4 for "Q4_K_M", 16 for "BF16"; 0 if none."""
    match = _BITS.search(quantization)
    return int(match["bits"]) if match else 0


def bits_in_file(quantization: str) -> float:
    """Return how many bits of a file each weight takes, within a few percent; 0.0 if the name does not tell."""
    bits = bits_of(quantization)
    return _BITS_IN_FILES.get(bits, float(bits))


def fewest_bits_first(quantizations: Iterable[str]) -> list[str]:
    """Sort quantizations by their bits; those of equally many keep their order."""
    return sorted(quantizations, key=bits_of)


def nearest_in_bits(wanted: str, quantizations: Iterable[str]) -> list[str]:
    """Sort quantizations by how far their bits are from those of `wanted`, the nearest first."""
    return sorted(fewest_bits_first(quantizations), key=lambda name: abs(bits_of(name) - bits_of(wanted)))
