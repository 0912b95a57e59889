"""Reads JSON schemas that are written as types, in a notation similar to TypeScript.

    count = integer(0..)
    Usage = {
      prompt_tokens: count; completion_tokens: count
      details?: {cached_tokens: count} | null
        // The tokens that were not computed.
    }

A name that begins with a capital letter refers to a schema of the document, and any other name is replaced by its type.
The basic types are string, number, integer, boolean, null, object, array, any, and literals. `(a..b)` limits a number,
the length of a string or the number of items in an array, and `string(NAME)` sets a pattern. `...name` adds the fields
of another object, and `{[string]: type}` allows any fields of one type. A comment describes the preceding type. Commas
and semicolons are treated like spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

_TOKEN: Final = re.compile(r'[\s,;]*(//.*|"[^"]*"|\.\.\.?|-?\w+|\S)')
_BASIC: Final[Mapping[str, Schema]] = {
    **{name: {"type": name} for name in ("string", "number", "integer", "boolean", "null", "object", "array")},
    **{word: {"const": json.loads(word)} for word in ("true", "false")},
    "any": {},
}
# The JSON schema keywords for the limits of each type
_LIMITS: Final[Mapping[str, tuple[str, str]]] = {
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def read_schemas(text: str, known: dict[str, Any]) -> dict[str, Schema]:
    """Return a text's schemas with capitalized names, and add the text's other types to `known`.

    known  maps names in the text to values: a schema, a literal, a tuple of literals, a number in limits, or a pattern
    """
    reader = _Reader(text.strip(), known)
    found = dict[str, Schema]()
    while reader.next:
        name = reader.take()
        reader.expect("=")
        types = found if name[0].isupper() else reader.known
        types[name] = reader.read_type()
    return found


class _Reader:
    """Reads a text token by token. `next` is the next token, or "" at the end."""

    def __init__(self, text: str, known: dict[str, Any]) -> None:
        self.known = known
        self._tokens = iter(_TOKEN.findall(text))
        self.next = next(self._tokens, "")

    def take(self) -> str:
        token, self.next = self.next, next(self._tokens, "")
        return token

    def expect(self, wanted: str) -> None:
        if (token := self.take()) != wanted:
            raise ValueError(f"expected {wanted!r}, got {token!r} before {self.next!r}")

    def accept(self, wanted: str) -> bool:
        if self.next != wanted:
            return False
        self.take()
        return True

    def read_type(self) -> Schema:
        choices = [self._read_choice()]
        while self.accept("|"):
            choices.append(self._read_choice())
        words = []
        while self.next.startswith("//"):
            words.append(self.take()[2:].strip())
        found = choices[0] if len(choices) == 1 else _any_of(choices)
        return {**found, "description": " ".join(words)} if words else found

    def _read_choice(self) -> Schema:
        found = self._read_one()
        while self.next in ("[", "("):
            if self.accept("["):
                self.expect("]")
                found = {"type": "array", "items": found}
            else:
                self.take()
                found = {**found, **self._read_limits(found["type"])}
        return found

    def _read_one(self) -> Schema:
        token = self.take()
        if token == "{":
            return self._read_object()
        if token == "(":
            found = self.read_type()
            self.expect(")")
            return found
        if token[0] == '"' or token.lstrip("-").isdecimal():
            return {"const": json.loads(token)}
        if token in _BASIC:
            return _BASIC[token]
        if token[0].isupper() and token not in self.known:
            return {"$ref": f"#/components/schemas/{token}"}
        value = self.known[token]
        if isinstance(value, tuple):
            return {"enum": [*value]}
        return value if isinstance(value, dict) else {"const": value}

    def _read_object(self) -> Schema:
        required, properties = list[str](), dict[str, Schema]()
        while not self.accept("}"):
            name = self.take()
            if name == "...":
                other = self.known[self.take()]
                required += other.get("required", ())
                properties |= other["properties"]
            elif name == "[":
                for token in ("string", "]", ":"):
                    self.expect(token)
                others = self.read_type()
                self.expect("}")
                return {"type": "object", "additionalProperties": others}
            else:
                if not self.accept("?"):
                    required.append(name)
                self.expect(":")
                properties[name] = self.read_type()
        return {"type": "object", **({"required": required} if required else {}), "properties": properties}

    def _read_limits(self, kind: str) -> Schema:
        low = "" if self.next == ".." else self.take()
        if self.accept(")"):
            return {"pattern": f"^{self.known[low]}$"}
        self.expect("..")
        high = "" if self.next == ")" else self.take()
        self.expect(")")
        limits = zip(_LIMITS[kind], (low, high), strict=True)
        return {keyword: self._number(limit) for keyword, limit in limits if limit}

    def _number(self, token: str) -> float:
        name = token.removeprefix("-")
        number = int(name) if name.isdecimal() else self.known[name]
        return -number if name != token else number


def _any_of(choices: list[Schema]) -> Schema:
    """Return the schema of a value that has one of several types."""
    literals = [choice.get("const") for choice in choices if "const" in choice or choice == _BASIC["null"]]
    if len(literals) == len(choices):
        return {"enum": literals}
    if all(choice.keys() == {"type"} for choice in choices):
        return {"type": [choice["type"] for choice in choices]}
    values = [choice["const"] for choice in choices if "const" in choice]
    others = [choice for choice in choices if "const" not in choice]
    return {"anyOf": [*([{"enum": values}] if values else []), *others]}
