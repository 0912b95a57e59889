r"""Translates regular expressions from ECMA-262, the syntax of JSON Schema, to Python's `re`.

Python's \d and \w match all of Unicode, ECMA's and llguidance's only ASCII. Without the translation, `^[^\w]+$` would
refuse "é", which both accept. Python's $ also matches before a final line break. Patterns that Python cannot express,
such as \p{L}, raise re.error when they are compiled.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(r"\\.|\[\^?|\]|\$|\(\?<(?![=!])|.", re.DOTALL)
_RANGES = {
    r"\d": r"0-9",
    r"\D": r"\x00-/:-\U0010ffff",
    r"\w": r"0-9A-Z_a-z",
    r"\W": r"\x00-/:-@\[-\^`{-\U0010ffff",
    r"\s": r"\s\ufeff",
}
_OUTSIDE_CLASSES = {"$": r"\Z", "(?<": "(?P<", r"\S": r"[^\s\ufeff]"}


@lru_cache(maxsize=1000)
def compile_ecma(pattern: str) -> re.Pattern[str]:
    """Compile an ECMA-262 pattern. Raises re.error."""
    parts = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        if token in _RANGES:
            parts.append(_RANGES[token] if in_class else f"[{_RANGES[token]}]")
        elif in_class:
            parts.append(r"\[" if token.startswith("[") else token)
            if token == "[^":
                parts.append("^")
            in_class = token != "]"
        else:
            parts.append(_OUTSIDE_CLASSES.get(token, token))
            in_class = token.startswith("[")
    return re.compile("".join(parts))
