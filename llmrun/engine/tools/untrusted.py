"""Reads untrusted JSON within limits, and removes control characters from untrusted text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Control characters except newline and tab, the characters that change the order of displayed text, the invisible "tag"
# characters, which can hide instructions from the user but not from the model, and lone surrogates.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]")


class RefusedJson(ValueError):
    """The text can be parsed as JSON, but its value exceeds our limits."""


def decode_json(data: bytes, depth: int) -> Any:
    """Parse JSON with at most `depth` nested arrays and objects.

    NaN and infinite numbers are refused too, because they are not JSON and cannot be passed on. Raises RefusedJson, or
    ValueError if the data is not JSON. Both have a one-line reason.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x}") from None
    except RecursionError:
        raise RefusedJson("nested too deeply") from None
    level = [value]
    for _ in range(depth + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise RefusedJson(f"nested more than {depth} levels deep")


def cleaned(text: str) -> str:
    r"""Return the text with normalized newlines, and with other control characters as escapes such as \x1b."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def cleaned_json(value: Any) -> Any:
    """Return a copy of a JSON value with `cleaned` strings and keys. Its depth must have been checked."""
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned_json(inner) for key, inner in value.items()}
    return [cleaned_json(inner) for inner in value] if isinstance(value, list) else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RefusedJson(f"{text[:20]} is not a finite number")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python refuses more than 4,300 digits
        raise RefusedJson(f"an integer of {len(text.lstrip('-')):,} digits") from None


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
