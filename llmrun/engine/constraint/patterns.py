r"""Patterns in JSON Schemas: exact patterns for formats, and the texts that a pattern of few texts matches.

llguidance enforces "format" inexactly or not at all: its patterns accept 29 February in every year, and a leap second
at any time of day (RFC 3339, sections 5.6 and 5.7). The patterns here handle leap years, and leave out leap seconds,
which generated text does not need. Everything that matches these patterns also passes the final validation, which uses
the original schema (see validation_worker.py). llguidance enforces "format" in the same way in all drafts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # a day that exists in every month
_MONTH_AND_DAY = f"((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"([0-9]{{4}}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS_AND_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_AND_MINUTES}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOURS_AND_MINUTES})"

_POINTER = "(/([^/~]|~[01])*)*"  # RFC 6901

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
# Formats that JSON Schema defines and that neither llguidance nor a pattern here enforces
_NOT_ENFORCED = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template")
_ENFORCED = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def replace_format(found: dict[str, Any]) -> None:
    """Replace the "format" of a schema with an exact pattern, unless the schema has a pattern of its own.

    Formats that JSON Schema does not define, such as OpenAPI's int32 and password, are annotations without an effect.
    """
    name = found.get("format")
    if not isinstance(name, str):
        return
    if name in PATTERNS and "pattern" not in found:
        del found["format"]
        found["pattern"] = PATTERNS[name]
    elif name not in (*PATTERNS, *_ENFORCED, *_NOT_ENFORCED):
        del found["format"]


# --- the texts of a pattern

_MOST: Final = 100  # texts
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
