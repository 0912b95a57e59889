"""Sets of code points, including the named sets that patterns use.

A set is a sorted int64 array of the code points at which membership changes, starting with the first member. For
example, `[A-C]` is [0x41, 0x44].
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.model.tokenizers import unicode_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    CodePoints = NDArray[np.int64]

N_CODE_POINTS = 0x110000

NAMED = {
    "L": unicode_ranges.LETTERS,
    "N": unicode_ranges.NUMBERS,
    "P": unicode_ranges.PUNCTUATION,
    "M": unicode_ranges.MARKS,
    "S": unicode_ranges.SYMBOLS,
    "C": unicode_ranges.CONTROL_CHARACTERS,
    "Cased": unicode_ranges.CASED_LETTERS,
    "Han": "3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B73F 2B740-2CEAF 2CEB0-2EBEF 2F800-2FA1F",
    "s": unicode_ranges.WHITE_SPACE,
    "ASCII symbols": "24 2B 3C-3E 5E 60 7C 7E",
    # Hugging Face's BERT normalizer has 2B920 instead of 2B820, and the vocabularies were made with it.
    "Ideographs of BERT": "3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B920-2CEAF 2F800-2FA1F",
}


@functools.cache
def named(name: str) -> CodePoints:
    """Return the set with this name in NAMED."""
    spans = [code_points.partition("-") for code_points in NAMED[name].split()]
    return union(*(span(int(first, 16), int(last or first, 16)) for first, _, last in spans))


def span(first: int, last: int) -> CodePoints:
    """Return the set of the code points from `first` to `last`, both included."""
    return np.array([first, last + 1], np.int64)


def union(*sets: CodePoints) -> CodePoints:
    """Return the code points that are in at least one of the sets."""
    if len(sets) == 1:
        return sets[0]
    # Sweep over all edges once. `depth` is the number of sets that contain the code points from an edge to the next.
    edges = np.concatenate(sets)
    steps = np.concatenate([_steps(one) for one in sets])
    places, where = np.unique(edges, return_inverse=True)
    depth = np.cumsum(np.bincount(where, weights=steps, minlength=len(places)))
    return _changes(places, depth > 0)


def complement(one: CodePoints) -> CodePoints:
    """Return the code points that are not in the set."""
    places = np.union1d(one, [0, N_CODE_POINTS])
    return _changes(places, ~contains(one, places) & (places < N_CODE_POINTS))


def intersection(one: CodePoints, other: CodePoints) -> CodePoints:
    """Return the code points that are in both sets."""
    places = np.union1d(one, other)
    return _changes(places, contains(one, places) & contains(other, places))


def contains(one: CodePoints, places: CodePoints) -> NDArray[np.bool_]:
    """Return whether the set contains each code point, as bool[places]."""
    inside: NDArray[np.bool_] = np.searchsorted(one, places, side="right") % 2 == 1
    return inside


def symbols_of(sets: list[CodePoints]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Assign a symbol to every code point. Code points that belong to exactly the same sets share a symbol.

    Returns uint8[N_CODE_POINTS], the symbol of each code point, and bool[sets, symbols], the symbols in each set. At
    most 62 sets are supported.
    """
    places = np.unique(np.concatenate([np.zeros(1, np.int64), *sets]))
    places = places[places < N_CODE_POINTS]
    membership = np.stack([contains(one, places) for one in sets])
    signature = (membership.astype(np.int64) << np.arange(len(sets))[:, None]).sum(axis=0)
    _, first, number = np.unique(signature, return_index=True, return_inverse=True)
    table = np.repeat(number.astype(np.uint8), np.diff(places, append=N_CODE_POINTS))
    return table, membership[:, first]


def _steps(one: CodePoints) -> CodePoints:
    steps = np.ones(len(one), np.int64)
    steps[1::2] = -1
    return steps


def _changes(places: CodePoints, inside: NDArray[Any]) -> CodePoints:
    """Build a set from sorted places.

    `inside[i]` is True if the set contains the code points from place i up to, but not including, place i + 1.
    """
    before = np.concatenate([np.zeros(1, np.bool_), inside[:-1]])
    changed: CodePoints = places[inside != before]
    return changed
