"""Checks an answer against its JSON Schema with jsonschema. Runs only in the isolated process.

Unless jsonschema is given a registry, it reads the files and fetches the URLs that a `$ref` names. The registry here is
empty and cannot retrieve anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from llmrun.engine.constraint import formats
from llmrun.engine.constraint.ecma_patterns import compile_ecma
from llmrun.engine.constraint.strict_json import TooManyDigits, parse
from llmrun.formats.gguf.problems import shown

_MOST_ERRORS = 100  # the most informative one of these is reported

_FORMATS = FormatChecker(formats=())
_FORMATS.checks("date")(formats.is_date)
_FORMATS.checks("time")(formats.is_time)
_FORMATS.checks("date-time")(formats.is_date_time)


def check(text: str, schema: Any) -> tuple[str, str]:
    """Return the verdict's kind and reason. Raises MemoryError or RecursionError."""
    try:
        answer = parse(text)
    except TooManyDigits as error:
        return "not validated", str(error)
    except ValueError as error:
        return "invalid", f"not JSON: {error}"
    if problem := schema_problem(schema):
        return "not validated", problem
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
    return ("valid", "") if worst is None else ("invalid", _reason(worst))


def schema_problem(schema: Any) -> str:
    """Return why the schema itself is invalid, or ""."""
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema, format_checker=FormatChecker(formats=()))  # patterns need not be Python's
    except SchemaError as error:
        return f"the schema is invalid: {_reason(error)}"
    return ""


def _reason(error: ValidationError | SchemaError) -> str:
    """Name the place as a JSON pointer, the problem, and the keyword that was violated."""
    place = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in error.absolute_path)
    where = shown(place, 80) or "top level"
    if error.validator is None:  # the schema `false`, for which jsonschema names only the schema around it
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
