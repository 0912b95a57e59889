r"""Lists the texts that a regular expression matches, for expressions that match only a few, such as ^(asc|desc)$."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Final

_MOST: Final = 100
_DEEPEST: Final = 20
_LONGEST: Final = 5_000  # characters of a pattern
_TOKEN = re.compile(r"\(\?:|[()|]|\[[^\[\]\\^][^\[\]\\]*\]|\\[^A-Za-z0-9]|[^\\()\[\]{}|^$*+?.]|(.)", re.DOTALL)
_RANGE = re.compile(r"(.)-(.)|(.)", re.DOTALL)


class _NotListed(Exception):
    """The expression matches many texts or is not understood."""


def listed_texts(pattern: str) -> list[str] | None:
    """Return the texts that a pattern matches, in order and without duplicates.

    Returns None if there are more than 100, or if the pattern contains anything except letters, classes, groups,
    alternatives and the anchors around them.
    """
    texts: list[str] = []
    if len(pattern) > _LONGEST:
        return None
    try:
        for branch in pattern.split("|") if "(" not in pattern else [pattern]:
            if not (branch.startswith("^") and branch.endswith("$")):
                return None
            parser = _Parser(branch[1:-1])
            texts += parser.sequence()
            if parser.rest or len(texts) > _MOST:
                return None
    except _NotListed:
        return None
    return [*dict.fromkeys(texts)]


class _Parser:
    """Parses an expression. `rest` contains the expression's remaining tokens in reverse order."""

    def __init__(self, text: str) -> None:
        found = [*_TOKEN.finditer(text)]
        if any(each[1] is not None for each in found):
            raise _NotListed
        self.rest = [each[0] for each in reversed(found)]
        self._depth = 0

    def sequence(self) -> list[str]:
        """Return the texts up to a vertical bar, a closing parenthesis or the end."""
        texts = [""]
        while self.rest and self.rest[-1] not in ("|", ")"):
            texts = _joined(texts, self._item(self.rest.pop()))
        return texts

    def _item(self, token: str) -> Sequence[str]:
        if token in ("(", "(?:"):
            return self._group()
        return _members(token[1:-1]) if token.startswith("[") else [token[-1]]

    def _group(self) -> list[str]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _NotListed
        texts = self.sequence()
        while self.rest and self.rest.pop() == "|":
            texts += self.sequence()
            if not self.rest:
                raise _NotListed
        self._depth -= 1
        return texts


def _members(inside: str) -> list[str]:
    """Return the letters of a class such as a-z."""
    members: list[str] = []
    for first, last, single in _RANGE.findall(inside):
        letters = range(ord(first), ord(last) + 1) if first else [ord(single)]
        if not 0 < len(letters) <= _MOST:
            raise _NotListed
        members += map(chr, letters)
    return members


def _joined(texts: Sequence[str], endings: Sequence[str]) -> list[str]:
    if len(texts) * len(endings) > _MOST:
        raise _NotListed
    return ["".join(parts) for parts in product(texts, endings)]
