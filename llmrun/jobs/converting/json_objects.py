"""Reads the JSON files of a checkpoint, which may be damaged or hostile, with a getter for each type of value.

Every problem is an error of one line that names the file and the key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, overload

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.engine.constraint.strict_json import parse_unique
from llmrun.formats.gguf.opening import opened, opening
from llmrun.formats.gguf.problems import shown

# The largest tokenizer.json of a published model has 35 MB, and about 2 million commas and brackets.
_MOST_BYTES = 64 << 20
_MOST_MARKS = 8_000_000  # because empty objects take 30 times as much memory as their text
MOST_INTEGER = 2**31 - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ANOTHER = "try another checkpoint, or a GGUF version of the model"

Default = TypeVar("Default")
_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}


class JsonObject:
    """An object of a JSON file.

    path   the file, for error messages
    where  the keys that lead to the object, with a dot after each
    """

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self.values = values
        self._where = where

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null."""
        return self.values.get(key) is not None

    def object(self, key: str) -> JsonObject:
        """Return the object at a key, or an empty one if there is none."""
        return JsonObject(self.path, self._typed(key, dict, {}), f"{self._where}{key}.")

    def objects(self, key: str) -> list[JsonObject]:
        """Return the array of objects at a key, or an empty list if there is none."""
        found = self.array(key)
        for index, value in enumerate(found):
            if not isinstance(value, dict):
                raise self.bad(key, f"element {index} must be an object, not {_kind(value)}")
        return [JsonObject(self.path, value, f"{self._where}{key}.{index}.") for index, value in enumerate(found)]

    def array(self, key: str) -> list[Any]:
        """Return the array at a key, or an empty one if there is none."""
        found: list[Any] = self._typed(key, list, [])
        return found

    def string(self, key: str, default: str = "") -> str:
        found: str = self._typed(key, str, default)
        return found

    @overload
    def boolean(self, key: str, default: bool) -> bool: ...
    @overload
    def boolean(self, key: str, default: None) -> bool | None: ...
    def boolean(self, key: str, default: bool | None) -> bool | None:
        found: bool | None = self._typed(key, bool, default)
        return found

    @overload
    def integer(self, key: str, *, minimum: int = 1) -> int: ...
    @overload
    def integer(self, key: str, default: Default, *, minimum: int = 1) -> int | Default: ...
    def integer(self, key: str, default: Any = ..., *, minimum: int = 1) -> Any:
        """Return an integer from `minimum` to MOST_INTEGER. Without a default, the key must be there."""
        if self._missing(key, default):
            return default
        value = self.values[key]
        if type(value) is not int or not minimum <= value <= MOST_INTEGER:
            raise self.bad(key, f"must be an integer of {minimum} to {MOST_INTEGER:,}, not {_kind(value)}")
        return value

    @overload
    def positive(self, key: str) -> float: ...
    @overload
    def positive(self, key: str, default: Default) -> float | Default: ...
    def positive(self, key: str, default: Any = ...) -> Any:
        """Return a number above 0 that fits into a float32. Without a default, the key must be there."""
        if self._missing(key, default):
            return default
        value = self.values[key]
        if type(value) not in (int, float) or not isfinite(value) or not 1e-30 < value < 1e30:
            raise self.bad(key, f"must be a positive number, not {_kind(value)}")
        return float(value)

    def bad(self, key: str, seen: str) -> ModelFileError:
        """Return the error for an invalid value."""
        return bad_checkpoint(self.path, f"{shown(self._where + key)} {seen}")

    def unsupported(self, key: str, seen: str) -> UnsupportedModel:
        """Return the error for a value that cannot be converted."""
        return unsupported(self.path, f"{shown(self._where + key)} {seen}")

    def _missing(self, key: str, default: Any) -> bool:
        if self.has(key):
            return False
        if default is ...:
            raise self.bad(key, "is missing")
        return True

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        if not self.has(key):
            return default
        value = self.values[key]
        if type(value) is not kind:
            raise self.bad(key, f"must be {_TYPES[kind]}, not {_kind(value)}")
        return value


def bad_checkpoint(path: Path, seen: str) -> ModelFileError:
    """Return the error for a file that breaks a rule of its format."""
    return ModelFileError(f"not a valid checkpoint: {shown(str(path), 300)}: {seen}", hint="download the file again")


def unsupported(path: Path, seen: str, hint: str = _ANOTHER) -> UnsupportedModel:
    """Return the error for a checkpoint that cannot be converted."""
    return UnsupportedModel(f"cannot be converted: {shown(str(path), 300)}: {seen}", hint=hint)


def read_json(path: Path) -> JsonObject:
    """Read a file that contains one object. Raises ModelNotFound and ModelFileError."""
    return parse_object(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a text file. Raises ModelNotFound and ModelFileError."""
    with opening(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise bad_checkpoint(path, f"has {size:,} bytes, but files of its kind have at most {_MOST_BYTES:,}")
        data = file.readall()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_checkpoint(path, f"is not UTF-8 text: byte {error.start:,} is invalid") from None


def parse_object(text: str, path: Path) -> JsonObject:
    """Parse one object. `path` is for error messages. Raises ModelFileError."""
    if sum(map(text.count, ",[{")) > _MOST_MARKS:
        raise bad_checkpoint(path, f"the JSON has more than {_MOST_MARKS:,} commas and brackets")
    try:
        value = parse_unique(text)
    except RecursionError:
        raise bad_checkpoint(path, "the JSON is nested too deeply") from None
    except ValueError as error:
        raise bad_checkpoint(path, f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_checkpoint(path, f"must contain an object, not {_kind(value)}")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad_checkpoint(path, "has text with an unpaired surrogate") from None
    return JsonObject(path, value)


def _kind(value: Any) -> str:
    """Describe a value briefly."""
    return _TYPES.get(type(value), "") if isinstance(value, dict | list) else f"'{shown(str(value), 40)}'"
