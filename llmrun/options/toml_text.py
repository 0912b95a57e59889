"""Finds the statements of a valid TOML text: where each heading and each key begins and ends.

The standard library's parser reports no positions. Errors need them to name the line of an entry, and commands that
change one table of a user's file need them to keep every other byte of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BASIC, _LITERAL = r'"(?:[^"\\\n]|\\.)*"', r"'[^'\n]*'"
_TOKEN = re.compile(
    rf'"""(?:[^\\]|\\.)*?"{{3,5}}|\'\'\'.*?\'{{3,5}}|{_BASIC}|{_LITERAL}|#[^\n]*|[ \t\r\ufeff]+|.', re.DOTALL
)
_KEY = re.compile(rf"[ \t]*(?P<quoted>{_BASIC}|{_LITERAL})?(?P<bare>[A-Za-z0-9_-]*)[ \t]*(?P<dot>\.?)")


class Statement(NamedTuple):
    """A heading, or a key with its value.

    path   the keys from the top of the file; for a key, those of the heading above come first
    start  the offset of the beginning of the first line
    end    the offset after the last line
    """

    path: tuple[str, ...]
    start: int
    end: int
    is_heading: bool


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a valid TOML text, in order. Comments and blank lines lie between statements."""
    heading: tuple[str, ...] = ()
    line = depth = 0
    first: int | None = None  # the offset of the statement's first character
    for token in _TOKEN.finditer(f"{text}\n"):
        character = token[0][0]
        if character == "\n" and depth == 0:
            if first is not None:
                is_heading = text[first] == "["
                keys = _keys(text, first + (2 if text.startswith("[[", first) else 1) if is_heading else first)
                heading = keys if is_heading else heading
                path = keys if is_heading else (*heading, *keys)
                yield Statement(path, line, min(token.end(), len(text)), is_heading)
            line, first = token.end(), None
        elif character not in "# \t\r\n\ufeff":
            first = token.start() if first is None else first
            depth += (character in "[{") - (character in "]}")


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the number of the line on which a table or key begins, or None if the text does not contain it."""
    best: Statement | None = None
    for statement in statements(text):
        if statement.path[: len(path)] == path:
            return text.count("\n", 0, statement.start) + 1
        if not statement.is_heading and path[: len(statement.path)] == statement.path:
            best = statement  # an inline table that contains the key
    return None if best is None else text.count("\n", 0, best.start) + 1


def _keys(text: str, position: int) -> tuple[str, ...]:
    """Return the dotted key at this position."""
    import tomllib  # imported late, because most runs do not need it

    keys: list[str] = []
    while (match := _KEY.match(text, position)) is not None:
        quoted = match["quoted"]
        keys.append(match["bare"] if quoted is None else tomllib.loads(f"key = {quoted}")["key"])
        position = match.end()
        if not match["dot"]:
            break
    return tuple(keys)
