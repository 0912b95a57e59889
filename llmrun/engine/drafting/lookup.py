"""Drafts by lookup: finds an earlier occurrence of the latest tokens, and drafts the tokens that followed it.

Answers often repeat parts of their prompt, of themselves, or of earlier answers, such as edited code, quotes, names and
lists. The method is known as prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding). Choosing
the longest match is an idea of SuffixDecoding (Oliaro et al., arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.engine.drafting.base import ANY, LONGEST_DRAFT, NO_DRAFT, Draft, Drafter, DraftSource, Kind, Worth

if TYPE_CHECKING:
    from llmrun.engine.requests import Request

_NAME = "lookup"
_LONGEST = 32  # tokens; a longer match does not make the next token more certain
_CANDIDATES = 16  # earlier occurrences of the last two tokens that are compared, newest first
_REMEMBERED = 32768  # tokens of finished answers
_BETWEEN = -1  # separates remembered answers; drafts end there
# Lower bounds of the classes of match lengths, and how often the next token is right. `scripts/measure_acceptance.py`
# measured 0.34 to 0.41, 0.44 to 0.51, 0.48 to 0.61, 0.61 to 0.70, 0.67 to 0.75, 0.71 to 0.81, 0.60 to 0.87, 0.90 and
# 0.95 for new code and new prose, and higher rates for edits. The rates below are near the lower measured rates,
# because the first guess must suit all texts.
_EXPECTED = {2: 0.35, 3: 0.45, 4: 0.5, 6: 0.65, 8: 0.7, 12: 0.8, 16: 0.85, 24: 0.9, 32: 0.95}


def _kind(match_length: int) -> Kind:
    return _NAME, max((bound for bound in _EXPECTED if bound <= match_length), default=2)


# The kinds of a draft's tokens after a match of n tokens begin at index n. Each draft token lengthens the match.
_KINDS = [_kind(length) for length in range(_LONGEST + LONGEST_DRAFT)]


class SuffixIndex:
    """Finds earlier occurrences of the end of a sequence.

    Positions that follow the same two tokens form a chain, from the newest to the oldest. Indexing takes about 0.5 us
    per token. In 32,768 tokens, a search takes 7 to 14 us, or 29 us in the slowest 1 % of cases.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._older: list[int] = [-1, -1]  # for each position, the previous position in its chain, or -1

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the sequence."""
        begin = max(len(self.tokens), 2)
        self.tokens += tokens
        for at in range(begin, len(self.tokens)):
            pair = self.tokens[at - 2], self.tokens[at - 1]
            self._older.append(self._newest.get(pair, -1))
            self._newest[pair] = at

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """Return (position after the match, match length) for the longest match of the end of `tail`.

        The length is 0 if not even the last two tokens of `tail` occur in the sequence. At most _LONGEST tokens of a
        match are compared, and the newest of the longest matches wins.
        """
        best_at, best = 0, 0
        at = self._newest.get((tail[-2], tail[-1]), -1) if len(tail) >= 2 else -1
        for _ in range(_CANDIDATES):
            if at < 0:
                break
            length = _match_length(self.tokens, at, tail)
            if length > best:
                best_at, best = at, length
                if best == _LONGEST:
                    break
            at = self._older[at]
        return best_at, best


def _match_length(tokens: Sequence[int], at: int, tail: Sequence[int]) -> int:
    """Return how many tokens before `at` equal the end of `tail`; the result is at least two."""
    most = min(_LONGEST, at, len(tail))
    length = 2
    while length < most and tokens[at - 1 - length] == tail[-1 - length]:
        length += 1
    return length


class LookupDrafter(Drafter):
    """Drafts the tokens of one answer from its prompt, from the answer itself and from earlier answers."""

    name = _NAME

    def __init__(self, source: LookupSource) -> None:
        self._source = source
        self._own = SuffixIndex()

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        self._own.append(tokens[len(self._own.tokens) :])
        tail = tokens[-_LONGEST:]
        index = self._own
        at, length = index.find(tail)
        if length < _LONGEST:
            other_at, other_length = self._source.remembered.find(tail)
            if other_length > length:
                index, at, length = self._source.remembered, other_at, other_length
        if length == 0:
            return NO_DRAFT
        found = _continuation(index.tokens, at, most)
        return Draft(tuple(found), tuple(_KINDS[length : length + len(found)]))


class LookupSource(DraftSource):
    """Creates lookup drafters, which share the memory of finished answers."""

    def __init__(self) -> None:
        self.expected = {_kind(length): rate for length, rate in _EXPECTED.items()} | {(_NAME, ANY): _EXPECTED[2]}
        self.remembered = SuffixIndex()

    def drafter(self, request: Request) -> LookupDrafter:
        return LookupDrafter(self)

    def learn(self, tokens: Sequence[int]) -> None:
        self.remembered.append([*tokens, _BETWEEN])
        if len(self.remembered.tokens) > 2 * _REMEMBERED:
            newest = self.remembered.tokens[-_REMEMBERED:]
            self.remembered = SuffixIndex()
            self.remembered.append(newest)

    def forget(self) -> None:
        self.remembered = SuffixIndex()


def _continuation(tokens: Sequence[int], at: int, most: int) -> list[int]:
    """Return up to `most` tokens from position `at` on.

    If the sequence ends earlier, the draft continues with its own tokens, because a sequence that repeats itself will
    probably continue to do so.
    """
    found: list[int] = []
    for position in range(at, at + most):
        token = tokens[position] if position < len(tokens) else found[position - len(tokens)]
        if token == _BETWEEN:
            break
        found.append(token)
    return found
