"""Typed access to metadata, with a getter for each type of value, and a check that a file is a model.

If a key is missing, the getter returns the default, or raises BadGGUF if there is no default. If the value has the
wrong type or is outside the limits, the getter always raises BadGGUF. Errors name the file, the key and the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from types import EllipsisType
from typing import Final, TypeVar, cast, overload

import numpy as np

from llmrun.base.errors import BadGGUF, ModelFileError
from llmrun.formats.gguf.problems import bad_gguf, shown
from llmrun.formats.gguf.values import NumberArray, StringArray, Value

Default = TypeVar("Default")

ADAPTER: Final = "adapter"

# Values of `general.type`, with the name of such a file and its use.
_OTHERS: Final = {
    ADAPTER: ("a LoRA adapter", "apply it to its model: llmrun chat MODEL --lora FILE"),
    "imatrix": ("an importance matrix", "use it with llmrun quantize IN OUT TYPE --imatrix FILE"),
    "mmproj": ("a vision projector", "name the file of the model itself"),
}


class Metadata:
    """The metadata of one file, as keys and values.

    path      the path of the file, for error messages
    metadata  key -> bool, int, float, str, NumPy array (a read-only view of the header) or StringArray
    types     key -> its type in the file: "u32", "str", "arr[f32]", ...
    """

    def __init__(self, path: Path, metadata: Mapping[str, Value], types: Mapping[str, str]) -> None:
        self.path = path
        self.metadata = metadata
        self.types = types

    def has(self, key: str) -> bool:
        return key in self.metadata

    def bad(self, key: str, seen: str) -> BadGGUF:
        """Return the error for an invalid value. `seen` describes the value found and the limit."""
        return bad_gguf(self.path, shown(key), seen)

    @overload
    def string(self, key: str) -> str: ...
    @overload
    def string(self, key: str, default: Default) -> str | Default: ...
    def string(self, key: str, default: Default | EllipsisType = ...) -> str | Default:
        if self._missing(key, default):
            return cast(Default, default)
        value = self.metadata[key]
        if not isinstance(value, str):
            raise self._wrong_type(key, "a string")
        return value

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: Default) -> bool | Default: ...
    def boolean(self, key: str, default: Default | EllipsisType = ...) -> bool | Default:
        if self._missing(key, default):
            return cast(Default, default)
        value = self.metadata[key]
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a boolean")
        return value

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: Default) -> float | Default: ...
    def number(self, key: str, default: Default | EllipsisType = ...) -> float | Default:
        """Return a finite float. Integers are converted to floats."""
        if self._missing(key, default):
            return cast(Default, default)
        value = self.metadata[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(key, "a number")
        if not isfinite(value):
            raise self.bad(key, f"must be finite, not {value}")
        return float(value)

    @overload
    def integer(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int: ...
    @overload
    def integer(
        self, key: str, default: Default, *, minimum: int | None = None, maximum: int | None = None
    ) -> int | Default: ...
    def integer(
        self,
        key: str,
        default: Default | EllipsisType = ...,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int | Default:
        """Return an integer of any width. Both limits are inclusive. They do not apply to the default."""
        if self._missing(key, default):
            return cast(Default, default)
        value = self.metadata[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(key, "an integer")
        if minimum is not None and value < minimum:
            raise self.bad(key, f"must be at least {minimum}, not {value}")
        if maximum is not None and value > maximum:
            raise self.bad(key, f"must be at most {maximum}, not {value}")
        return value

    def integers(self, key: str) -> NumberArray:
        """Return an array [n] of integers of any width, as a view of the header."""
        return self._array(key, "iu", "an array of integers")

    def numbers(self, key: str) -> NumberArray:
        """Return an array [n] of floats or integers of any width, as a view of the header."""
        return self._array(key, "fiu", "an array of numbers")

    def strings(self, key: str) -> StringArray:
        self._missing(key, ...)
        value = self.metadata[key]
        if not isinstance(value, StringArray):
            raise self._wrong_type(key, "an array of strings")
        return value

    def _array(self, key: str, kinds: str, wanted: str) -> NumberArray:
        self._missing(key, ...)
        value = self.metadata[key]
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self._wrong_type(key, wanted)
        return value

    def _missing(self, key: str, default: object) -> bool:
        """Return whether the key is missing. Raises BadGGUF if it is and there is no default."""
        if key in self.metadata:
            return False
        if default is ...:
            raise self.bad(key, "the key is missing")
        return True

    def _wrong_type(self, key: str, wanted: str) -> BadGGUF:
        return self.bad(key, f"must be {wanted}, not {self.types[key]}")


def purpose_of(file: Metadata) -> str:
    """Return what a file is if it is not a model, such as "a LoRA adapter", or ""."""
    kind = file.metadata.get("general.type")
    return _OTHERS[kind][0] if isinstance(kind, str) and kind in _OTHERS else ""


def check_is_model(file: Metadata) -> None:
    """Raise ModelFileError for a file that belongs to a model but is not one."""
    if purpose := purpose_of(file):
        raise ModelFileError(
            f"not a model: {shown(str(file.path), 300)} is {purpose}", hint=_OTHERS[file.string("general.type")][1]
        )
