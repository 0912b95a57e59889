"""Converts a Document to JSON and back.

The JSON mirrors document.py. Each object has exactly the keys that its dataclass has in the document's `format`.
Decoding validates everything, because a file may be damaged or written by another program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.bench.documents.document import FORMAT, Document

DEEPEST = 16  # The maximum nesting depth of a value.
LARGEST = 2**63 - 1  # The largest integer that other programs can be expected to read.
FARTHEST = 1e30  # The largest magnitude of a number. No measurement exceeds it, and the sum of its squares is finite.


def to_json(document: Document) -> dict[str, Any]:
    """Return a document as a value for `json.dumps`, in field order. Raises LlmrunError if JSON cannot express it."""
    return {"format": FORMAT, **_encoded(document, "document", 0)}


def from_json(value: object, where: str) -> Document:
    """Return the Document that `to_json` encoded. `where` names the file in error messages.

    Raises only UsageError, which names the key of the invalid value.
    """
    if not isinstance(value, dict):
        _refuse(where, "document", value, "an object")
    found = value.get("format")
    if type(found) is not int or found < 1:
        _refuse(where, "format", found, f"an integer from 1 to {FORMAT}")
    if found > FORMAT:
        raise UsageError(
            f"{where}: format: {found if found <= LARGEST else 'a huge one'} is from a newer llmrun; this version "
            f"reads formats up to {FORMAT}",
            hint="update llmrun: git pull in its clone, or install a newer wheel",
        )
    fields = {key: item for key, item in value.items() if key != "format"}
    document: Document = _Decoder(where, found).dataclass(Document, fields, "")
    _check_indices(document, where)
    return document


def _check_indices(document: Document, where: str) -> None:
    for name in ("verdicts", "answer_checks"):
        for number, pair in enumerate(getattr(document, name)):
            for key in ("of", "against"):
                index = getattr(pair, key)
                if index >= len(document.results):
                    _refuse(where, f"{name}[{number}].{key}", index, f"an index of {len(document.results)} results")


def _encoded(value: Any, key: str, depth: int) -> Any:
    if depth > 2 * DEEPEST:
        raise LlmrunError(f"results: {key}: nested too deeply to be saved")
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encoded(getattr(value, field.name), f"{key}.{field.name}", depth + 1)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {_text(str(name)): _encoded(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encoded(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise LlmrunError(f"results: {key}: {value!r} cannot be saved as JSON")


def _text(text: str) -> str:
    """Escape lone surrogates, which JSON does not allow. Python uses them in file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


class _Decoder:
    """Decodes JSON of one format into the dataclasses of document.py.

    A method's `key` is the path of the value in the document.
    """

    def __init__(self, where: str, version: int) -> None:
        self._where = where
        self._version = version

    def dataclass(self, kind: type, value: object, key: str) -> Any:
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        fields = {name: hint for name, hint in _fields(kind).items() if self._knows(kind, name)}
        before = f"{key}." if key else ""
        for name in fields:
            if name not in value:
                raise UsageError(f"{self._where}: {before}{name}: missing")
        for name in value:
            if name not in fields:
                raise UsageError(f"{self._where}: {before}{_shown(name)}: unknown key")
        return kind(**{name: self.value(hint, value[name], before + name) for name, hint in fields.items()})

    def _knows(self, kind: type, name: str) -> bool:
        """Return whether the document's format has this field of a dataclass."""
        field = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]  # `kind` is a dataclass
        return bool(field.metadata.get("since", 1) <= self._version)

    def value(self, kind: Any, value: object, key: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is types.UnionType:  # The only unions in document.py are `X | None`.
            return None if value is None else self.value(arguments[0], value, key)
        if origin is tuple:
            return self.row(arguments, value, key)
        if origin is Mapping:
            if not isinstance(value, dict):
                self.refuse(key, value, "an object")
            return {
                self.text(name, key): self.value(arguments[1], item, f"{key}.{_shown(name)}")
                for name, item in value.items()
            }
        if kind is Any:
            return self.anything(value, key, 0)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.dataclass(kind, value, key)
        simple = {str: self.text, bool: self.truth, int: self.integer, float: self.number}
        return simple[kind](value, key)

    def row(self, kinds: tuple[Any, ...], value: object, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self.refuse(key, value, "a list")
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        if len(value) != len(kinds):
            self.refuse(key, value, f"a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(self.value(kind, item, f"{key}[{index}]") for index, (kind, item) in pairs)

    def anything(self, value: object, key: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise UsageError(f"{self._where}: {key}: nested too deeply, limit {DEEPEST}")
        if isinstance(value, dict):
            return {
                self.text(name, key): self.anything(item, f"{key}.{_shown(name)}", depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self.anything(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value, key)
        if isinstance(value, int):
            if abs(value) > LARGEST:
                self.refuse(key, value, f"an integer of at most {LARGEST}")
            return value
        return self.number(value, key)

    def text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            self.refuse(key, value, "text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.refuse(key, value, "text that UTF-8 can encode")
        return value

    def truth(self, value: object, key: str) -> bool:
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def integer(self, value: object, key: str) -> int:
        if type(value) is not int or not 0 <= value <= LARGEST:
            self.refuse(key, value, f"an integer from 0 to {LARGEST}")
        return value

    def number(self, value: object, key: str) -> float:
        if type(value) is int and abs(value) <= LARGEST:
            return float(value)
        if type(value) is not float or not abs(value) <= FARTHEST:  # This also rejects NaN.
            self.refuse(key, value, f"a number of at most {FARTHEST:g}")
        return value

    def refuse(self, key: str, value: object, rule: str) -> NoReturn:
        _refuse(self._where, key, value, rule)


def _refuse(where: str, key: str, value: object, rule: str) -> NoReturn:
    raise UsageError(f"{where}: {key or 'document'}: {_shown(value)} is not {rule}")


def _shown(value: object) -> str:
    """Describe a value in at most 40 characters: printable ASCII, and "…" at the end if it was shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return "a huge integer"
    text = ascii(value) if not isinstance(value, str) or not value.isidentifier() else value
    return text if len(text) <= 40 else text[:39] + "…"
