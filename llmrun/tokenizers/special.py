"""Special tokens in a text: those that are control (`<|im_end|>`, never what a user typed) and those a model's makers
added as words (user-defined, found in any text). Finding them comes before everything else a tokenizer does.

A text that a user, a tool or a file wrote is *protected* before it goes into a chat template: inside every control
string in it, after its first character, stands a mark, U+FDD0, a code point that Unicode keeps out of all text. The
string is then simply not there, whatever the template does to the text around it; a mark already in the text is
doubled. `unmark` takes the marks out again and says where they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MARK = "\ufdd0"

_ASCII_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    token_id: int
    text: str
    is_control: bool
    strips_right: bool = False  # white space after it belongs to it


class SpecialTokens:
    """All special tokens of a vocabulary, found longest first, as llama.cpp does."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        by_length = sorted(tokens, key=lambda token: -len(token.text.encode()))
        # Most texts hold no special token, and most special tokens of a vocabulary begin alike: a text without
        # "<|" needs one search, not 256.
        self._by_prefix: dict[str, list[tuple[int, SpecialToken]]] = defaultdict(list)
        for order, token in enumerate(by_length):
            self._by_prefix[token.text[:2]].append((order, token))

    def partition(self, text: str, *, parse_control: bool, marks: Sequence[int] = ()) -> list[str | int]:
        """Text and ids of special tokens, in order. Control strings stay text unless `parse_control`; one with a
        mark inside always does. `marks` are positions as `unmark` gives them."""
        spans = [(0, len(text), -1)] if text else []
        for token in self._present(text):
            if parse_control or not token.is_control:
                spans = _cut_at(token, text, spans, marks if token.is_control else ())
        return [text[start:end] if token_id < 0 else token_id for start, end, token_id in spans]

    def protect(self, text: str) -> str:
        """The text with every control string broken by a mark, and its own marks doubled."""
        places: set[int] = set()
        for token in self._present(text):
            if token.is_control:
                inside = _mark_offset(token)
                at = text.find(token.text)
                while at >= 0:
                    places.add(at + inside)
                    at = text.find(token.text, at + 1)
        cuts = [0, *sorted(places), len(text)]
        return MARK.join(text[start:end].replace(MARK, MARK * 2) for start, end in pairwise(cuts))

    def _present(self, text: str) -> list[SpecialToken]:
        """The special tokens whose text occurs, longest first."""
        found = [
            numbered
            for prefix, tokens in self._by_prefix.items()
            if prefix in text
            for numbered in tokens
            if numbered[1].text in text
        ]
        return [token for _, token in sorted(found, key=lambda numbered: numbered[0])]


def unmark(text: str) -> tuple[str, list[int]]:
    """(the text without marks, the positions in it at which a mark stood). A doubled mark becomes one character."""
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
    """A mark stands after the first character, or before the only one."""
    return min(len(token.text) - 1, 1)


def _cut_at(
    token: SpecialToken, text: str, spans: list[tuple[int, int, int]], marks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Cut the plain spans, those with id -1, at every place where the token stands unmarked."""
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
            if at > start:
                result.append((start, at, -1))
            start = at + length
            result.append((at, start, token.token_id))
            while token.strips_right and start < end and text[start] in _ASCII_SPACE:
                start += 1
            search = start
        if start < end:
            result.append((start, end, -1))
    return result


def _is_marked(marks: Sequence[int], first: int, after: int) -> bool:
    """Whether a mark stands at a position from `first` up to, not including, `after`."""
    return bool(marks) and bisect_left(marks, first) < bisect_left(marks, after)
