"""Converts dataclasses to values that JSON can represent, and back, following their type hints.

    dataclass               an object of the fields whose values differ from their defaults
    union of dataclasses    [class name, object]
    bytes                   text with one character, chr(byte), for each byte
    Mapping[int, float]     a list of pairs
    LlmrunError             {"error": class name, "message", "hint", ...}
    float                   a number; Python's JSON also has NaN, Infinity and -Infinity

Decoding is strict: a value of another type raises BadMessage, because it means that the two processes do not run the
same code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from llmrun.base import errors
from llmrun.base.errors import LlmrunError
from llmrun.engine.constraint.base import ResponseFormat

# Classes that modules import only for type checkers, so that get_type_hints would not find them.
_NAMES: Mapping[str, Any] = {"ResponseFormat": ResponseFormat}
_ERROR_FIELDS = ("retry_after", "state", "most_weights")


class BadMessage(Exception):
    """A message does not have the form that this version of llmrun sends."""


class Codec(NamedTuple):
    """The two directions of a conversion. `decode` raises BadMessage."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def codec_of(hint: Any) -> Codec:
    """Return the codec of a type. Raises TypeError for types that no message has."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (bool, int, str, type(None)):
        return Codec(_same, _checked(hint))
    if hint is float:
        return Codec(_same, _checked(int, float))
    if hint is Any:
        return Codec(_same, _same)
    if hint is bytes:
        return Codec(lambda value: value.decode("latin-1"), lambda value: _as(str, value).encode("latin-1"))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple or origin is frozenset or origin is Sequence:
        return _many(origin, arguments)
    if origin is Mapping:
        return _mapping(*arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Codec(lambda value: value.value, lambda value: _member(hint, value))
    if isinstance(hint, type) and issubclass(hint, LlmrunError):
        return Codec(error_to_json, error_from_json)
    if is_dataclass(hint):
        return _dataclass(hint)
    raise TypeError(f"no codec for {hint}")


def error_to_json(error: LlmrunError) -> dict[str, Any]:
    """Convert an error. A class that is not in llmrun.base.errors is sent as its nearest base class that is."""
    known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    details = {name: getattr(error, name) for name in _ERROR_FIELDS if hasattr(error, name)}
    return {"error": known.__name__, "message": str(error), "hint": error.hint, **details}


def error_from_json(value: Any) -> LlmrunError:
    """Convert an error back. Unknown classes become LlmrunError. Raises BadMessage."""
    found = _as(dict, value)
    kind = getattr(errors, str(found.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, LlmrunError)):
        kind = LlmrunError
    error = kind(str(found.get("message")), hint=str(found.get("hint", "")))
    for name in _ERROR_FIELDS:
        if name in found and hasattr(error, name):
            setattr(error, name, found[name])
    return error


def _dataclass(kind: Any) -> Codec:
    hints = get_type_hints(kind, localns=dict(_NAMES))
    codecs = {field.name: codec_of(hints[field.name]) for field in fields(kind)}
    encoders = [(field.name, _default(field), codecs[field.name].encode) for field in fields(kind)]
    decoders = {name: codec.decode for name, codec in codecs.items()}

    def encode(value: Any) -> dict[str, Any]:
        encoded = {}
        for name, default, encode_field in encoders:
            content = getattr(value, name)
            if content != default:
                encoded[name] = encode_field(content)
        return encoded

    def decode(value: Any) -> Any:
        try:
            return kind(**{name: decoders[name](content) for name, content in _as(dict, value).items()})
        except (KeyError, TypeError) as error:
            raise BadMessage(f"{kind.__name__}: {error}") from error

    return Codec(encode, decode)


def _default(field: Field[Any]) -> Any:
    """Return a field's default. MISSING differs from every value, so a field without a default is always encoded."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _union(options: Sequence[Any]) -> Codec:
    present = [option for option in options if option is not type(None)]
    if len(present) < len(options):
        codec = codec_of(present[0]) if len(present) == 1 else _union(present)
        return Codec(
            lambda value: None if value is None else codec.encode(value),
            lambda value: None if value is None else codec.decode(value),
        )
    if not all(is_dataclass(option) for option in present):
        raise TypeError(f"no codec for a union of {present}")
    codecs = {option.__name__: codec_of(option) for option in present}

    def encode(value: Any) -> list[Any]:
        name = type(value).__name__
        return [name, codecs[name].encode(value)]

    def decode(value: Any) -> Any:
        match value:
            case [str(name), content] if name in codecs:
                return codecs[name].decode(content)
        raise BadMessage(f"{value!r:.100} is not one of {', '.join(codecs)}")

    return Codec(encode, decode)


def _many(kind: Any, arguments: Sequence[Any]) -> Codec:
    item = codec_of(arguments[0])
    make = list if kind is Sequence else kind
    order = sorted if kind is frozenset else list

    def decode(value: Any) -> Any:
        return make(map(item.decode, _as(list, value)))

    return Codec(lambda value: order(map(item.encode, value)), decode)


def _mapping(key_type: Any, value_type: Any) -> Codec:
    key, item = codec_of(key_type), codec_of(value_type)
    if key_type is str:
        return Codec(
            lambda value: {name: item.encode(content) for name, content in value.items()},
            lambda value: {name: item.decode(content) for name, content in _as(dict, value).items()},
        )

    def decode(value: Any) -> Any:
        pairs = [_as(list, pair) for pair in _as(list, value)]
        if any(len(pair) != 2 for pair in pairs):
            raise BadMessage(f"{value!r:.100} is not a list of pairs")
        return {key.decode(name): item.decode(content) for name, content in pairs}

    return Codec(lambda value: [[key.encode(name), item.encode(content)] for name, content in value.items()], decode)


def _member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        raise BadMessage(str(error)) from error


def _checked(*kinds: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise BadMessage(f"{value!r:.100} is not of type {kinds[-1].__name__}")
        return value

    return check


def _as(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise BadMessage(f"{value!r:.100} is not of type {kind.__name__}")
    return value


def _same(value: Any) -> Any:
    return value
