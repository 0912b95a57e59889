r"""Translates regular expressions from ECMA-262, the syntax of JSON Schema, to Python's `re`.

Python's \d and \w match all of Unicode, but those of ECMA-262 and llguidance match only ASCII. Without the translation,
`^[^\w]+$` would refuse "é", which both of them accept. Python's $ also matches before a final line break, and Python
has no general categories, such as \p{L}. Patterns that Python cannot express, such as \p{Greek}, raise re.error when
they are compiled.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache, lru_cache
from itertools import groupby

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
    """Return (category, first, last) for all runs of code points of the same general category, in 0.2 s."""
    runs = []
    first = 0
    for category, run in groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        after = first + sum(1 for _ in run)
        runs.append((category, first, after - 1))
        first = after
    return runs
