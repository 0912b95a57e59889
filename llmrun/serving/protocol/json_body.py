"""Parses the JSON body of a request that may be hostile."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from llmrun.engine.constraint.strict_json import parse_unique
from llmrun.formats.gguf.problems import shown
from llmrun.serving.protocol.errors import InvalidField

MOST_DEPTH: Final = 128  # levels; a schema of 100 levels, the most that the engine accepts, still fits into a request
# Empty lists take 40 times as much memory as their text. No context has room for a text with this many commas.
_MOST_MARKS: Final = 2_000_000


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object, in time proportional to its length.

    The result contains only what can be encoded as JSON again: text without unpaired surrogates, and finite numbers.
    Raises InvalidField if the body is not UTF-8, is not strict JSON, has a key twice in one object, is nested more than
    MOST_DEPTH levels deep, or has too many values. The largest body of 16 MiB takes 1 s, so call this in a thread.
    """
    if not data:
        raise InvalidField(None, "the request body is empty", hint="send a JSON object")
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_MARKS:
        raise InvalidField(None, f"the request body has more than {_MOST_MARKS:,} commas and brackets")
    try:
        value = parse_unique(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidField(None, f"the request body is not UTF-8 text: invalid byte at {error.start:,}") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno:,}, column {error.colno:,}"
        raise InvalidField(None, f"the request body is not valid JSON: {error.msg}: {place}") from None
    except ValueError as error:
        raise InvalidField(None, f"the request body is not valid JSON: {shown(str(error), 200)}") from None
    if type(value) is not dict:
        raise InvalidField(None, "the request body is not a JSON object")
    _check(value)
    return value


def _check(value: dict[str, Any]) -> None:
    """Raise InvalidField for a value that cannot be encoded again, or that is nested too deeply."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _too_deep()
        deeper: list[Any] = []
        for container in level:
            is_object = type(container) is dict
            if is_object:
                for key in container:
                    _check_text(key)
            for item in container.values() if is_object else container:
                kind = type(item)
                if kind is dict or kind is list:
                    deeper.append(item)
                elif kind is str:
                    _check_text(item)
                elif kind is float and not math.isfinite(item):
                    raise InvalidField(None, "the request body has a number that is too large")
        level = deeper


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = shown(text[max(0, error.start - 20) : error.start + 1])
        raise InvalidField(None, f"the request body has an unpaired surrogate in a string: {around}") from None


def _too_deep() -> InvalidField:
    return InvalidField(None, f"the request body is nested more than {MOST_DEPTH} levels deep")
