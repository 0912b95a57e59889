r"""Checks an answer against its JSON Schema with jsonschema. This module runs only in the isolated process.

Without a registry, jsonschema reads the files and fetches the URLs that a `$ref` names. The registry
here is empty and retrieves nothing.

Patterns: JSON Schema uses the syntax of ECMA-262, which is translated to Python's `re`. Python's \d and \w match all of
Unicode, but \d and \w in ECMA-262 and llguidance match only ASCII. Without translation, `^[^\w]+$` would reject "é",
which ECMA-262 and llguidance accept. Python's $ also matches before a final line break, and Python supports no
categories such as \p{L}. Patterns that Python cannot express, such as \p{Greek}, raise re.error when they are compiled.

Formats: llguidance enforces ten formats with regular expressions while the answer is generated. In the JSON Schema test
suite, three of the ten formats accept invalid strings: 29 February in common years, and leap seconds at a wrong time
of day (RFC 3339, sections 5.6 and 5.7). Only these three formats are checked here. The verdict therefore does not
depend on the installed optional libraries of jsonschema.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from calendar import monthrange
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache
from itertools import groupby, islice
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from llmrun.base.errors import shown
from llmrun.engine.constraint.strict_json import TooManyDigits, parse

_TOKEN = re.compile(r"\\[pP]\{\w+\}|\\.|\[\^?|\]|\$|\(\?<(?![=!])|.", re.DOTALL)
_RANGES = {
    r"\d": r"0-9",
    r"\D": r"\x00-/:-\U0010ffff",
    r"\w": r"0-9A-Z_a-z",
    r"\W": r"\x00-/:-@\[-\^`{-\U0010ffff",
    r"\s": r"\s\ufeff",
}
_OUTSIDE_CLASSES = {"$": r"\Z", "(?<": "(?P<", r"\S": r"[^\s\ufeff]"}
_LONG_NAMES = {
    "Letter": "L",
    "Mark": "M",
    "Number": "N",
    "Punctuation": "P",
    "Symbol": "S",
    "Separator": "Z",
    "digit": "Nd",
}


@lru_cache(maxsize=1000)
def compile_ecma(pattern: str) -> re.Pattern[str]:
    """Compile an ECMA-262 pattern. Raises re.error."""
    parts = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        ranges = _RANGES.get(token) or _ranges_of_category(token)
        if ranges:
            parts.append(ranges if in_class else f"[{ranges}]")
        elif in_class:
            parts.append(r"\[" if token.startswith("[") else token)
            if token == "[^":
                parts.append("^")
            in_class = token != "]"
        else:
            parts.append(_OUTSIDE_CLASSES.get(token, token))
            in_class = token.startswith("[")
    return re.compile("".join(parts))


def _ranges_of_category(token: str) -> str:
    r"""Return the ranges of a token such as \p{Lu} or \P{Letter}, or "" for other tokens."""
    if not token.startswith((r"\p{", r"\P{")):
        return ""
    name = _LONG_NAMES.get(token[3:-1], token[3:-1])
    if not any(category.startswith(name) for category, _, _ in _runs()):
        return ""
    wanted = token[1] == "p"
    return "".join(
        f"\\U{first:08x}-\\U{last:08x}" for category, first, last in _runs() if category.startswith(name) == wanted
    )


@cache
def _runs() -> list[tuple[str, int, int]]:
    """Return (category, first, last) for each run of code points of one general category, in 0.2 s."""
    runs = []
    first = 0
    for category, run in groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        after = first + sum(1 for _ in run)
        runs.append((category, first, after - 1))
        first = after
    return runs


_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII)


def is_date(text: object) -> bool:
    """Return True if the text is a full-date of RFC 3339. As in JSON Schema, values that are not text are valid."""
    if not isinstance(text, str):
        return True
    found = _DATE.fullmatch(text)
    if found is None:
        return False
    year, month, day = map(int, found.groups())
    # The calendar repeats every 400 years, and Python's calendar begins with year 1.
    return 1 <= month <= 12 and 1 <= day <= monthrange(2000 + year % 400, month)[1]


def is_time(text: object) -> bool:
    """Return True if the text is a full-time of RFC 3339."""
    if not isinstance(text, str):
        return True
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    hour, minute, second = (int(found[group]) for group in (1, 2, 3))
    ahead, behind = (int(found[group] or 0) for group in (5, 6))
    offset = (ahead * 60 + behind) * (-1 if found[4] == "-" else 1)
    if hour > 23 or minute > 59 or ahead > 23 or behind > 59:
        return False
    return second < 60 or (second == 60 and (hour * 60 + minute - offset) % 1440 == 1439)


def is_date_time(text: object) -> bool:
    """Return True if the text is a date-time of RFC 3339."""
    return not isinstance(text, str) or (is_date(text[:10]) and text[10:11] in ("T", "t") and is_time(text[11:]))


_MOST_ERRORS = 100  # number of errors to collect; the most informative error is reported

_FORMATS = FormatChecker(formats=())
_FORMATS.checks("date")(is_date)
_FORMATS.checks("time")(is_time)
_FORMATS.checks("date-time")(is_date_time)


def verdict_of(text: str, schema: Any) -> tuple[str, str]:
    """Return the verdict's kind and reason. Raises MemoryError or RecursionError."""
    try:
        answer = parse(text)
    except TooManyDigits as error:
        return "not validated", str(error)
    except ValueError as error:
        return "invalid", f"not JSON: {error}"
    if grammar_problem := schema_problem(schema):
        return "not validated", grammar_problem
    draft = validator_for(schema, default=Draft202012Validator)
    validator = extend(draft, {"pattern": _pattern, "multipleOf": _multiple_of})(
        schema, registry=Registry(), format_checker=_FORMATS
    )
    try:
        worst = best_match(islice(validator.iter_errors(answer), _MOST_ERRORS))
    except Unresolvable as missing:
        return "not validated", f"$ref cannot be resolved: {missing.ref}"
    except re.error as wrong:
        return "not validated", f"a pattern is not supported: {wrong} in {shown(str(wrong.pattern))}"
    return ("valid", "") if worst is None else ("invalid", _violation(worst))


def schema_problem(schema: Any) -> str:
    """Return the reason why the schema itself is invalid, or ""."""
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema, format_checker=FormatChecker(formats=()))  # allows non-Python patterns
    except SchemaError as error:
        return f"the schema is invalid: {_violation(error)}"
    return ""


def _violation(error: ValidationError | SchemaError) -> str:
    """Return an error's place as a JSON pointer, the problem, and the violated keyword."""
    place = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in error.absolute_path)
    where = shown(place, 80) or "top level"
    if error.validator is None:  # for the schema `false`, jsonschema reports only the surrounding schema
        return f"within {where}: {shown(error.message, 160)} (false)"
    return f"{where}: {shown(error.message, 160)} ({error.validator})"


def _pattern(_: Any, pattern: str, text: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(text, str) and not compile_ecma(pattern).search(text):
        yield ValidationError(f"{shown(text, 60)!r} does not match {pattern!r}")


def _multiple_of(validator: Any, divisor: Any, number: Any, _: Any) -> Iterator[ValidationError]:
    """Divide exactly. With floats, 19.99 would not be a multiple of 0.01."""
    if validator.is_type(number, "number"):
        finite = number not in (float("inf"), float("-inf"))
        if not finite or Fraction(repr(number)) % Fraction(repr(divisor)):
            yield ValidationError(f"{number!r} is not a multiple of {divisor!r}")
