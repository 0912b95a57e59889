"""Parses JSON without Python's extensions: no NaN, no infinity, no key that occurs twice in one object."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from llmrun.gguf.problems import shown

MOST_DIGITS = 4300  # of an integer, which is also Python's default limit; parsing takes quadratic time


class DuplicateKey(ValueError):
    """A key occurs twice in one object."""


class TooManyDigits(ValueError):
    """An integer is too long to parse. It is valid JSON."""


def parse(text: str) -> Any:
    """Parse one JSON value. Raises ValueError with a short message, or RecursionError.

    Keys that occur twice raise DuplicateKey. RFC 8259 leaves their meaning open, parsers disagree about it, and JSON
    Schema does not define it. Numbers such as 1e999 become infinity, as in every parser that uses doubles.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f'the key "{shown(key, 40)}" occurs twice in one object')
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise TooManyDigits(f"an integer has {len(text):,} digits, limit {MOST_DIGITS:,}")
    return int(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
