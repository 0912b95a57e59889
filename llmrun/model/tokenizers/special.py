"""Finds special tokens in text, which is the first step of tokenization.

Special tokens are either control tokens such as `<|im_end|>`, which users must not be able to insert, or user-defined
tokens: words that the model's authors added, and that may appear in any text.

Untrusted text from users, tools and files is *protected* before a chat template renders it. `protect` inserts a mark
after the first character of every control string, so that the string no longer matches, even if the template changes
the surrounding text. The mark is U+FDD0, a code point that Unicode excludes from text interchange. Marks that the text
already contains are doubled. `unmark` removes the marks and returns their positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.compiled.store import load_kernel
from llmrun.formats.layouts.tokens import CONTROL, NOT_FOUND, ONE_CHARACTER

if TYPE_CHECKING:
    from numpy.typing import NDArray

MARK = "\ufdd0"

# The kernel tries to match tokens at every possible position, which takes time in proportion to the longest token. The
# limit prevents a malicious file from slowing down the kernel. Longer tokens are searched for one after another.
_LONGEST_IN_TREE = 512  # maximum length in bytes

_ASCII_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token or user-defined token."""

    token_id: int
    text: str
    is_control: bool
    strips_right: bool = False  # also matches the whitespace after the token
    strips_left: bool = False  # also matches the whitespace before the token


class SpecialTokens:
    """The special tokens of a vocabulary. As in llama.cpp, longer tokens match first."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        ordered = sorted(tokens, key=lambda token: -len(token.text.encode()))
        self._long = [token for token in ordered if len(token.text.encode()) > _LONGEST_IN_TREE]
        self._tokens = ordered[len(self._long) :]
        self._find_kernel = load_kernel("tokens.special_tokens", "find")
        texts = [token.text.encode() for token in self._tokens]
        self._lengths = [len(text) for text in texts]
        self._ids = np.array([token.token_id for token in self._tokens], np.int32)
        flags = [CONTROL * token.is_control | ONE_CHARACTER * (len(token.text) == 1) for token in self._tokens]
        self._flags = np.array(flags, np.uint8)
        joined = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        ends = np.cumsum(self._lengths, dtype=np.int64)
        self._edges = np.zeros((1 << (2 * len(joined)).bit_length(), 2), np.int64)
        self._beginnings = np.zeros(256, np.uint8)
        self._nodes = np.full(len(joined), NOT_FOUND, np.int32)
        load_kernel("tokens.special_tokens", "build")(
            joined.ctypes.data,
            ends.ctypes.data,
            len(texts),
            self._edges.ctypes.data,
            len(self._edges) - 1,
            self._beginnings.ctypes.data,
            self._nodes.ctypes.data,
        )

    def partition(self, text: str, *, parse_control: bool, marks: Sequence[int] = ()) -> list[bytes | int]:
        """Split text into UTF-8 text and the ids of special tokens, in order.

        Control strings stay text unless `parse_control` is True. Control strings that contain a mark always stay text.
        `marks` are the positions that `unmark` returns.
        """
        encoded = text.encode()
        found = self._find(encoded, parse_control=parse_control, marks=_byte_offsets(text, marks))
        long = self._long_in(text)
        wanted = (token for token in found.present if parse_control or not token.is_control)
        if long or found.overlap or any(token.strips_left or token.strips_right for token in wanted):
            return self._partition_by_length(text, [*long, *found.present], parse_control=parse_control, marks=marks)
        parts: list[bytes | int] = []
        done = 0
        for at, number in zip(found.places.tolist(), found.numbers.tolist(), strict=True):
            if at > done:
                parts.append(encoded[done:at])
            parts.append(int(self._ids[number]))
            done = at + self._lengths[number]
        if done < len(encoded):
            parts.append(encoded[done:])
        return parts

    def protect(self, text: str) -> str:
        """Insert a mark into every control string, and double the marks that the text already contains."""
        places: set[int] = set()
        found = self._find(text.encode(), parse_control=True, marks=())
        for token in [*self._long_in(text), *found.present]:
            if token.is_control:
                inside = _mark_offset(token)
                at = text.find(token.text)
                while at >= 0:
                    places.add(at + inside)
                    at = text.find(token.text, at + 1)
        cuts = [0, *sorted(places), len(text)]
        return MARK.join(text[start:end].replace(MARK, MARK * 2) for start, end in pairwise(cuts))

    def _partition_by_length(
        self, text: str, present: Sequence[SpecialToken], *, parse_control: bool, marks: Sequence[int]
    ) -> list[bytes | int]:
        """Split text with one pass per token, from the longest to the shortest, which is llama.cpp's algorithm.

        Only this algorithm is correct if tokens overlap or strip whitespace.
        """
        spans = [(0, len(text), -1)] if text else []
        for token in present:
            if parse_control or not token.is_control:
                spans = _cut_at(token, text, spans, marks if token.is_control else ())
        return [text[start:end].encode() if token_id < 0 else token_id for start, end, token_id in spans]

    def _long_in(self, text: str) -> list[SpecialToken]:
        return [token for token in self._long if token.text in text]

    def _find(self, encoded: bytes, *, parse_control: bool, marks: Sequence[int]) -> _Found:
        buffer = np.frombuffer(encoded + b"\0", np.uint8)
        at_marks = np.array(marks, np.int64)
        present = np.zeros(len(self._tokens), np.uint8)
        places = np.empty(len(encoded), np.int64)
        numbers = np.empty(len(encoded), np.int32)
        result = np.zeros(2, np.int64)
        self._find_kernel(
            buffer.ctypes.data,
            len(encoded),
            at_marks.ctypes.data,
            len(marks),
            int(parse_control),
            self._beginnings.ctypes.data,
            self._edges.ctypes.data,
            len(self._edges) - 1,
            self._nodes.ctypes.data,
            self._flags.ctypes.data,
            present.ctypes.data,
            places.ctypes.data,
            numbers.ctypes.data,
            result.ctypes.data,
        )
        count, overlap = result.tolist()
        occurring = [self._tokens[number] for number in np.flatnonzero(present).tolist()]
        return _Found(occurring, places[:count], numbers[:count], bool(overlap))


@dataclass(frozen=True, slots=True)
class _Found:
    """The kernel's result for a text.

    present  the tokens that occur, longest first
    places   the byte offset of each match
    numbers  the index of each match's token in the list of tokens, which is sorted by length
    overlap  True if any matches overlap
    """

    present: list[SpecialToken]
    places: NDArray[np.int64]
    numbers: NDArray[np.int32]
    overlap: bool


def _byte_offsets(text: str, positions: Sequence[int]) -> list[int]:
    """Convert ascending positions in a text into byte offsets in the UTF-8 encoding of the text."""
    offsets = []
    done = length = 0
    for position in positions:
        length += len(text[done:position].encode())
        done = position
        offsets.append(length)
    return offsets


def unmark(text: str) -> tuple[str, list[int]]:
    """Return the text without marks, and the positions of the marks in this text. A doubled mark becomes one mark."""
    kept: list[str] = []
    marks: list[int] = []
    length = start = 0
    while (at := text.find(MARK, start)) >= 0:
        doubled = text.startswith(MARK, at + 1)
        kept.append(text[start : at + doubled])
        length += len(kept[-1])
        if not doubled:
            marks.append(length)
        start = at + 1 + doubled
    kept.append(text[start:])
    return "".join(kept), marks


def _mark_offset(token: SpecialToken) -> int:
    """Return the offset of the mark within a control string: 1, or 0 if the string has only one character."""
    return min(len(token.text) - 1, 1)


def _cut_at(
    token: SpecialToken, text: str, spans: list[tuple[int, int, int]], marks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Split the plain-text spans (spans with id -1) at every unmarked occurrence of the token."""
    result = []
    length = len(token.text)
    for start, end, token_id in spans:
        if token_id >= 0:
            result.append((start, end, token_id))
            continue
        search = start
        while (at := text.find(token.text, search, end)) >= 0:
            if _is_marked(marks, at + _mark_offset(token), at + length):
                search = at + 1
                continue
            before = at
            while token.strips_left and before > start and text[before - 1] in _ASCII_SPACE:
                before -= 1
            if before > start:
                result.append((start, before, -1))
            start = at + length
            result.append((at, start, token.token_id))
            while token.strips_right and start < end and text[start] in _ASCII_SPACE:
                start += 1
            search = start
        if start < end:
            result.append((start, end, -1))
    return result


def _is_marked(marks: Sequence[int], first: int, after: int) -> bool:
    """Return True if a mark is at a position p with `first` <= p < `after`."""
    return bool(marks) and bisect_left(marks, first) < bisect_left(marks, after)
