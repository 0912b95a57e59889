"""Parses JSON without Python's extensions NaN and Infinity."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from llmrun.base.errors import shown

MOST_DIGITS = 4300  # digits of an integer; Python has the same default, because parsing takes quadratic time


class TooManyDigits(ValueError):
    """An integer is too long to parse, although it is valid JSON."""


def parse(text: str) -> Any:
    """Parse one JSON value. Raises ValueError with a short message, or RecursionError.

    If a key occurs twice in one object, the last value wins, as in Python, JavaScript and Go. Numbers such as 1e999
    become infinity, as in every parser that uses doubles.
    """
    return json.loads(text, parse_constant=_refuse, parse_int=_integer)


def parse_unique(text: str) -> Any:
    """Parse one JSON value in which no object repeats a key. Raises ValueError or RecursionError, as `parse` does.

    RFC 8259 leaves the meaning of repeated keys open, so parsers disagree. In a schema, a repeated key is a mistake.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_int=_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f'the key "{shown(key, 40)}" occurs twice in one object')
            seen.add(key)
    return found


def _integer(text: str) -> int:
    n_digits = len(text.removeprefix("-"))
    if n_digits > MOST_DIGITS:
        raise TooManyDigits(f"an integer has {n_digits:,} digits, limit {MOST_DIGITS:,}")
    return int(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
