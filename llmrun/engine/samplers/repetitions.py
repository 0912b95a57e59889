"""Finds where the last tokens of a sequence occur earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 16  # tokens in the first comparison; later ones are longer


def suffix_lengths(latest_first: NDArray[np.intp], least: int) -> NDArray[np.int64]:
    """Return for each place how many tokens from there on equal the latest tokens, int64[tokens].

    latest_first  tokens, the latest one first
    least         the smallest length of interest, at least 1; shorter ones are reported as 0

    This is the Z-algorithm, with whole boxes in a few NumPy operations. A box is a place with the equal tokens after
    it. The lengths inside of a box are those at the start of the sequence, as far as the box reaches.
    """
    n = len(latest_first)
    lengths = np.zeros(n, np.int64)
    starts = _occurrences(latest_first, least)
    at = 0
    while at < len(starts):
        start = int(starts[at])
        length = least + _common_length(latest_first[start + least :], latest_first[least:])
        lengths[start] = length
        at = int(np.searchsorted(starts, _fill_box(lengths, start, length, least)))
    return lengths


def _fill_box(lengths: NDArray[np.int64], start: int, length: int, least: int) -> int:
    """Set the lengths inside a box, as far as they are known, and return the first place that is not known.

    The length at `start + i` is the one at i, or the rest of the box if that is less. If both are equal, it may be
    longer, as the box says nothing about the token after it. In a box that is longer than `start`, the tokens repeat
    with a period of `start`.
    """
    inside = np.arange(1, length - least + 1)
    rest = length - inside
    at_front = lengths[inside % start]
    at_front[inside % start == 0] = len(lengths)
    open_ended = np.flatnonzero(at_front == rest) if start + length < len(lengths) else inside[:0]
    known = int(open_ended[0]) if len(open_ended) else len(inside)
    lengths[start + 1 : start + 1 + known] = np.minimum(at_front, rest)[:known]
    return start + 1 + known


def _occurrences(latest_first: NDArray[np.intp], least: int) -> NDArray[np.intp]:
    """Return the places after the first one where the `least` latest tokens occur."""
    last = max(len(latest_first) - least, 0)
    found = np.flatnonzero(latest_first[1 : last + 1] == latest_first[0]) + 1
    for offset in range(1, least):
        if not len(found):
            break
        found = found[latest_first[found + offset] == latest_first[offset]]
    return found


def _common_length(one: NDArray[np.intp], other: NDArray[np.intp]) -> int:
    """Return the number of equal tokens at the start of two arrays, of which the first is not longer."""
    done, block = 0, _BLOCK
    while done < len(one):
        end = min(done + block, len(one))
        different = np.flatnonzero(one[done:end] != other[done:end])
        if len(different):
            return done + int(different[0])
        done, block = end, 4 * block
    return len(one)
