"""Writes the pieces of a Lark grammar for llguidance: literals, regular expressions, JSON schemas and rules.

Everything that comes from a tool or a template goes through these functions, which escape it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.exact_formats import with_exact_formats

_PLACEHOLDERS = re.compile(r"([\ud800-\udfff])")
_SPECIAL = re.compile(r"[\\/.+*?()|\[\]{}^$#&\-~<>@%!\"'`=:,; ]")


class Rules:
    """The rules of a grammar, with generated names.

    tokens  the token id for each placeholder
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._known: dict[str, str] = {}
        self._names = 0

    def new_name(self, terminal: bool = False) -> str:
        """Return a name that no rule has. Terminals, which match one piece of text, have uppercase names."""
        self._names += 1
        return f"T{self._names}" if terminal else f"r{self._names}"

    def define(self, name: str, body: str) -> None:
        """Add a rule with this name."""
        self._lines.append(f"{name}: {body}")

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, unless there is one with this body. Returns its name."""
        return self._named(body, options, terminal=False)

    def terminal(self, body: str) -> str:
        """Add a terminal, unless there is one with this body. Returns its name."""
        return self._named(body, "", terminal=True)

    def _named(self, body: str, options: str, terminal: bool) -> str:
        key = f"{terminal}{options}:{body}"
        if key not in self._known:
            self._known[key] = self.new_name(terminal)
            self.define(self._known[key] + options, body)
        return self._known[key]

    def text(self) -> str:
        """Return the whole grammar."""
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"

    def literal(self, text: str) -> str:
        """Return an expression for exactly this text, in which placeholders stand for control tokens, or ""."""
        parts = [part for part in _PLACEHOLDERS.split(text) if part]
        return " ".join(f"<[{self.tokens[part]}]>" if part in self.tokens else string(part) for part in parts)


def string(text: str) -> str:
    """Return a string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(text: str) -> str:
    """Return a regular expression without slashes that matches exactly this text."""
    escaped = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(escaped.get(letter) or _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    if ord(letter) < 0x20 or ord(letter) == 0x7F:
        return f"\\x{ord(letter):02x}"
    return "\\" + letter if _SPECIAL.match(letter) and letter not in " \"'`=:,;<>@%!" else letter


def without(*texts: str) -> str:
    """Return a terminal body that restricts another one to text without any of these. Begins with "&" or is empty."""
    return "".join(f" & ~/(?s:.*){regex(text)}(?s:.*)/" for text in texts if text)


def one_of(options: Sequence[str]) -> str:
    """Return an expression for any of these expressions."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def schema(value: Any, separators: tuple[str, str] | None, where: str, ascii_only: bool = False) -> str:
    """Return an expression for JSON that matches a schema. `where` names the tool in errors.

    separators  the texts after a value and after a key; None if whitespace is free
    ascii_only  True if strings may contain escapes for any character
    """
    spacing: dict[str, Any] = {"whitespace_flexible": True}
    if separators is not None:
        spacing = {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    if ascii_only:
        spacing["json_allow_general_unicode_escapes"] = True
    try:
        exact = with_exact_formats(value)
        text = json.dumps({**exact, "x-guidance": spacing}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"schema cannot be written as JSON: {where}: {type(error).__name__}") from error
    return "%json " + text.replace("\x7f", "\\u007f")
