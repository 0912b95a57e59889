"""Finds where the last tokens of a sequence occur earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORT = 8  # short repetitions exceed the smallest length of interest by less than this, in tokens
_BLOCK = 64  # tokens in the first comparison; later ones are longer


def suffix_lengths(latest_first: NDArray[np.intp], least: int) -> NDArray[np.int64]:
    """Return for each place how many tokens from there on equal the latest tokens, int64[tokens].

    latest_first  tokens, the latest one first
    least         the smallest length of interest, at least 1; shorter ones are reported as 0

    Short repetitions are found for all places at once. The others are found with the Z-algorithm, which fills whole
    boxes with a few NumPy operations. A box is a run of tokens that equals the start of the sequence. The lengths
    inside a box are those at the start of the sequence, as far as the box reaches.
    """
    lengths = np.zeros(len(latest_first), np.int64)
    known = least + _SHORT
    starts = _find_short(latest_first, lengths, least, known)
    at = 0
    while at < len(starts):
        start = int(starts[at])
        length = known + _common_length(latest_first[start + known :], latest_first[known:])
        lengths[start] = length
        at = int(np.searchsorted(starts, _fill_box(lengths, start, length, known)))
    return lengths


def _fill_box(lengths: NDArray[np.int64], start: int, length: int, least: int) -> int:
    """Set the lengths inside a box where at least `least` tokens are left, and return the first place that is not set.

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


def _find_short(latest_first: NDArray[np.intp], lengths: NDArray[np.int64], least: int, most: int) -> NDArray[np.intp]:
    """Set the lengths from `least` to `most - 1`, and return the places of longer ones."""
    found = np.flatnonzero(latest_first[1:] == latest_first[0]) + 1
    for offset in range(1, most):
        if not len(found):
            break
        if offset >= least:
            lengths[found] = offset
        found = found[found < len(latest_first) - offset]
        found = found[latest_first[found + offset] == latest_first[offset]]
    return found


def _common_length(one: NDArray[np.intp], other: NDArray[np.intp]) -> int:
    """Return the number of equal tokens at the start of two arrays. The first array must not be longer."""
    done, block = 0, _BLOCK
    while done < len(one):
        end = min(done + block, len(one))
        different = np.flatnonzero(one[done:end] != other[done:end])
        if len(different):
            return done + int(different[0])
        done, block = end, 4 * block
    return len(one)
