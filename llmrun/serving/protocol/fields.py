"""Reads the fields of a JSON object with strict types, and keeps track of unread fields."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from llmrun.base.errors import shown
from llmrun.serving.protocol.errors import InvalidField

T = TypeVar("T")

MOST_INTEGER: Final = (1 << 31) - 1  # larger values have no use, and kernels have 32-bit parameters
_LONGEST_SHOWN: Final = 60  # characters of a value in a message
_INDEX: Final = re.compile(r"\[\d+\]")


class Fields:
    """The fields of one JSON object. A field with the value null counts as missing.

    Every method except `peek` marks its field as read. The typed methods raise InvalidField if the value has another
    type or is out of range. Errors contain the field's path in the body, such as "stream_options.include_usage".
    """

    def __init__(self, body: Mapping[str, Any], place: str = "") -> None:
        """Store a parsed JSON object and the object's path in the body, which is "" for the body itself."""
        self._body = body
        self._place = place
        self._read: set[str] = set()
        self._inner: list[Fields] = []

    @property
    def place(self) -> str:
        """The path of the object in the body."""
        return self._place

    def path(self, name: str) -> str:
        """Return the path of a field in the body."""
        return f"{self._place}.{name}" if self._place else name

    def value(self, name: str) -> Any:
        """Return the value of a field of any type, or None."""
        self._read.add(name)
        return self._body.get(name)

    def peek(self, name: str) -> Any:
        """Return the value of a field of any type, or None, without marking the field as read."""
        return self._body.get(name)

    def rest(self) -> dict[str, Any]:
        """Return the fields that are set but have not been read, and mark them as read."""
        found = {name: value for name, value in self._body.items() if name not in self._read and value is not None}
        self._read |= found.keys()
        return found

    def given(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return the set fields (optionally only the given names) in the client's order, and mark them as read."""
        found = {
            name: value for name, value in self._body.items() if value is not None and (names is None or name in names)
        }
        self._read |= found.keys()
        return found

    def unread(self) -> tuple[str, ...]:
        """Return the paths of the fields that are set but have not been read, such as "messages[].cache_control".

        Unread fields in the results of `fields` and `item_fields` are included.
        """
        found: dict[str, None] = {}
        waiting = [self]
        for fields in waiting:
            body, read = fields._body, fields._read
            names = [name for name, value in body.items() if name not in read and value is not None]
            if names:
                place = _INDEX.sub("[]", fields._place)
                found |= dict.fromkeys(f"{place}.{name}" if place else name for name in names)
            waiting += fields._inner
        return tuple(found)

    def boolean(self, name: str) -> bool | None:
        """Return the value of a boolean field, or None."""
        value = self.value(name)
        if value is not None and type(value) is not bool:
            raise self._wrong_type(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return the value of a string field, or None."""
        value = self.value(name)
        if value is not None and type(value) is not str:
            raise self._wrong_type(name, "a string")
        return value

    def word(self, name: str, words: Collection[str]) -> str | None:
        """Return the value of a field that allows only the given strings, or None."""
        value = self.text(name)
        if value is not None and value not in words:
            raise self.wrong(name, "one of " + ", ".join(words))
        return value

    def integer(self, name: str, minimum: int, maximum: int = MOST_INTEGER) -> int | None:
        """Return the value of an integer field within the inclusive limits, or None."""
        value = self.value(name)
        words = f"an integer from {minimum} to {maximum}"
        if maximum == MOST_INTEGER:
            words = f"an integer of at least {minimum}"
        if value is not None and type(value) is not int:
            raise self._wrong_type(name, words)
        if value is not None and not minimum <= value <= maximum:
            raise self.wrong(name, words)
        return value

    def number(self, name: str, minimum: float, maximum: float) -> float | None:
        """Return the finite value of a number field within the inclusive limits, or None."""
        value = self.value(name)
        words = f"a number from {minimum:g} to {maximum:g}"
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self._wrong_type(name, words)
        if not (minimum <= value <= maximum and -math.inf < value < math.inf):
            raise self.wrong(name, words)
        return float(value)

    def items(self, name: str) -> list[Any] | None:
        """Return the value of a list field, or None."""
        value = self.value(name)
        if value is not None and type(value) is not list:
            raise self._wrong_type(name, "a list")
        return value

    def object(self, name: str) -> Mapping[str, Any] | None:
        """Return the value of an object field, or None."""
        value = self.value(name)
        if value is not None and type(value) is not dict:
            raise self._wrong_type(name, "an object")
        return value

    def fields(self, name: str) -> Fields | None:
        """Return the fields of the object in a field, or None."""
        value = self.object(name)
        if value is None:
            return None
        return self._with_inner(value, self.path(name))

    def item_fields(self, name: str) -> list[Fields] | None:
        """Return the fields of each object in a list, or None."""
        items = self.items(name)
        if items is None:
            return None
        for number, item in enumerate(items):
            if type(item) is not dict:
                place = f"{self.path(name)}[{number}]"
                raise InvalidField(place, f"expected an object, got {seen(item)}", code="invalid_type")
        return [self._with_inner(item, f"{self.path(name)}[{number}]") for number, item in enumerate(items)]

    def needed_text(self, name: str) -> str:
        """Return the value of a required string field."""
        return needed(self, name, self.text(name))

    def _with_inner(self, body: Mapping[str, Any], place: str) -> Fields:
        found = Fields(body, place)
        self._inner.append(found)
        return found

    def wrong(self, name: str, wanted: str) -> InvalidField:
        """Return the error for a value that the API does not accept."""
        return InvalidField(self.path(name), f"expected {wanted}, got {seen(self._body.get(name))}")

    def _wrong_type(self, name: str, wanted: str) -> InvalidField:
        problem = f"expected {wanted}, got {seen(self._body.get(name))}"
        return InvalidField(self.path(name), problem, code="invalid_type")


def agreed(given: Mapping[str, T]) -> T | None:
    """Return the common value of several fields, or None if no fields are given. Raises InvalidField if values differ.

    given  maps fields with the same meaning to their values
    """
    names = [*given]
    for name in names[1:]:
        if given[name] != given[names[0]]:
            raise InvalidField(name, f"contradicts {names[0]}", hint="send only one of these fields")
    return given[names[0]] if names else None


def needed(fields: Fields, name: str, value: T | None) -> T:
    """Return the value of a required field. Raises InvalidField if the value is None."""
    if value is None:
        raise missing(fields.path(name))
    return value


def read_strings(fields: Fields, name: str) -> list[str] | None:
    """Return the value of a field that is a list of strings, or None."""
    items = fields.items(name)
    for number, item in enumerate(items or ()):
        if type(item) is not str:
            place = f"{fields.path(name)}[{number}]"
            raise InvalidField(place, f"expected a string, got {seen(item)}", code="invalid_type")
    return items


def missing(path: str) -> InvalidField:
    """Return the error for a required field that is missing."""
    return InvalidField(path, "this field is required", code="missing_required_parameter")


def seen(value: Any) -> str:
    """Return a short description of a JSON value for messages."""
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is str:
        return f'"{shown(value, _LONGEST_SHOWN)}"'
    if type(value) is list:
        return "a list" if value else "an empty list"
    if type(value) is dict:
        return "an object"
    return shown(str(value), _LONGEST_SHOWN)
