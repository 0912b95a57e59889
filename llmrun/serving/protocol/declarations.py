"""Reads and describes the JSON objects of APIs, each of which is declared once, as a TypedDict.

    class Tool(TypedDict, total=False):
        type: Literal["function"]
        function: Required[Function]
        strict: Annotated[bool, "Refuse the tool if its schema cannot be enforced."]

`read` converts the body of a request to a declared object, and reports the fields that have no effect. `schemas`
returns the JSON schemas of declared objects. A field with the value null counts as missing.

A text in `Annotated` is the description of the field. The classes below can also be in `Annotated`. Types whose names
begin with an underscore have no schema of their own in the OpenAPI document.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NotRequired,
    Protocol,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from llmrun.base.errors import shown
from llmrun.serving.protocol.errors import InvalidField, unsupported

T = TypeVar("T")
Schema = dict[str, Any]

MOST_INTEGER: Final = (1 << 31) - 1  # larger values have no use, and kernels have 32-bit parameters
_LONGEST_SHOWN: Final = 60  # characters of a value in a message
_INDEX: Final = re.compile(r"\[\d+\]")


class Limits(NamedTuple):
    """The inclusive limits of a number, of the length of a string, or of the number of items in a list.

    noun  what a list contains, for messages
    """

    low: float = -math.inf
    high: float = math.inf
    noun: str = "item"


class Matching(NamedTuple):
    """A string that matches a regular expression. `words` describe the expected string in messages."""

    pattern: str
    words: str


class Expected(NamedTuple):
    """The words that describe the expected value in messages."""

    words: str


class Without(NamedTuple):
    """A value within the limits that is not allowed."""

    value: float


class Usual(NamedTuple):
    """The values of a field that change nothing. A field with any other value has no effect and is reported."""

    values: tuple[Any, ...]


class Refused(NamedTuple):
    """A field of which the server supports only the accepted values. A field of the type Any is not in the schema.

    problem  the message for other values; by default, the message says that the value is not supported
    """

    accepted: tuple[Any, ...] = ()
    advice: str = ""
    problem: str = ""


class Tagged(NamedTuple):
    """A union of objects that differ in the values of the field `name`.

    default  the value that `read` sets if the field is missing, or "" if the field is required
    unknown  the message for other values, with {} for the value; by default, the message lists the possible values
    advice   the hint for other values
    """

    name: str
    default: str = ""
    unknown: str = ""
    advice: str = ""


class Inline(NamedTuple):
    """Fields of the same JSON object that other code declares. `read` collects these fields in an object of their own.

    fields  returns the types of the fields by name
    """

    fields: Callable[[], Mapping[str, Any]]


class Keywords(NamedTuple):
    """Additional keywords of the JSON schema."""

    keywords: Mapping[str, Any]


KEPT: Final = "kept"  # an object whose undeclared fields are kept, because templates can use them


def read(declared: type[T], body: Mapping[str, Any], place: str = "") -> tuple[T, tuple[str, ...]]:
    """Return the declared fields of an object, and the paths of fields that have no effect. Raises InvalidField.

    Errors contain the path of the field, such as "stream_options.include_usage". The paths of ignored fields have no
    numbers, as in "messages[].cache_control".

    declared  a TypedDict
    place     the path of the object in the body, which is "" for the body itself
    """
    ignored: list[str] = []
    found = kind_of(declared).read(body, place, ignored)
    return found, tuple(dict.fromkeys(_INDEX.sub("[]", path) for path in sorted(ignored, key=_depth)))


def _depth(path: str) -> int:
    return path.count(".") + path.count("[")


def schemas(*declared: Any) -> dict[str, Schema]:
    """Return the JSON schemas of types by name, including the schemas that they refer to."""
    found: dict[str, Schema] = {}
    for each in declared:
        kind_of(each).schema(found)
    return found


class Kind(Protocol):
    """The set of JSON values that a type allows.

    words  describes an allowed value, for messages
    """

    words: str

    def fits(self, value: Any) -> bool:
        """Return whether a value has the right JSON type."""

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        """Return an allowed value. Raises InvalidField for other values.

        ignored  receives the path of each field that has no effect
        """

    def schema(self, found: dict[str, Schema]) -> Schema:
        """Return the JSON schema, and add the schemas of all named objects to `found`."""


@dataclass(slots=True)
class _Plain:
    """A boolean, a number, a string, or any value at all."""

    words: str
    types: tuple[type, ...]
    keywords: Schema
    low: float = -math.inf
    high: float = math.inf
    without: float | None = None
    pattern: str | None = None

    def fits(self, value: Any) -> bool:
        return not self.types or type(value) in self.types

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        if not self.fits(value):
            raise wrong_type(place, self.words, value)
        if type(value) is str:
            self._check_text(value, place)
        elif self.types and not (self.low <= value <= self.high and value != self.without):
            raise wrong(place, self.words, value)
        return float(value) if float in self.types else value

    def allows_all(self, values: list[Any]) -> bool:
        """Return True for a list of allowed integers."""
        is_integers = int in self.types and set(map(type, values)) == {int}
        return is_integers and self.low <= min(values) and max(values) <= self.high

    def _check_text(self, text: str, place: str) -> None:
        if not text and (self.low, self.high) == (1, math.inf):
            raise wrong(place, "a text that is not empty", text)
        if not self.low <= len(text) <= self.high:
            limits = (
                f"{max(self.low, 0):.0f} to {self.high:,.0f}" if self.high < math.inf else f"at least {self.low:.0f}"
            )
            raise InvalidField(place, f"expected {limits} characters, got {len(text):,}")
        if self.pattern is not None and not re.fullmatch(self.pattern, text):
            raise wrong(place, self.words, text)

    def schema(self, found: dict[str, Schema]) -> Schema:
        return self.keywords


@dataclass(slots=True)
class _Choice:
    """One of several literal values, or of the values of an enumeration, which `read` returns as a member."""

    words: str
    values: tuple[Any, ...]
    member: Callable[[Any], Any] = lambda value: value

    def fits(self, value: Any) -> bool:
        return type(value) in {type(each) for each in self.values}

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        if not self.fits(value):
            raise wrong_type(place, "a string" if type(self.values[0]) is str else self.words, value)
        if value not in self.values:
            raise wrong(place, self.words, value)
        return self.member(value)

    def schema(self, found: dict[str, Schema]) -> Schema:
        return {"const": self.values[0]} if len(self.values) == 1 else {"enum": [*self.values]}


@dataclass(slots=True)
class _List:
    item: Kind
    limits: Limits
    words: str = "a list"

    def fits(self, value: Any) -> bool:
        return type(value) is list

    def read(self, value: Any, place: str, ignored: list[str]) -> list[Any]:
        if type(value) is not list:
            raise wrong_type(place, self.words, value)
        low, high, noun = self.limits
        if len(value) < low:
            raise InvalidField(place, f"expected at least one {noun}, got an empty list")
        if len(value) > high:
            raise InvalidField(place, f"{len(value):,} {noun}s are too many; the limit is {high:,}")
        if isinstance(self.item, _Plain) and self.item.allows_all(value):
            return value  # millions of token IDs are checked in a tenth of the time
        return [self.item.read(each, f"{place}[{number}]", ignored) for number, each in enumerate(value)]

    def schema(self, found: dict[str, Schema]) -> Schema:
        return {"type": "array", "items": self.item.schema(found), **_limits("minItems", "maxItems", self.limits)}


@dataclass(slots=True)
class _Map:
    """An object with any names whose values have the same type."""

    value: Kind
    words: str = "an object"

    def fits(self, value: Any) -> bool:
        return type(value) is dict

    def read(self, value: Any, place: str, ignored: list[str]) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(place, self.words, value)
        given = {name: each for name, each in value.items() if each is not None or self.value.fits(None)}
        return {
            name: self.value.read(each, f"{place}.{shown(name, _LONGEST_SHOWN)}", ignored)
            for name, each in given.items()
        }

    def schema(self, found: dict[str, Schema]) -> Schema:
        others = self.value.schema(found)
        return {"type": "object", **({"additionalProperties": others} if others else {})}


@dataclass(slots=True)
class _Field:
    """A field of an object. `usual` contains the values without effect if all other values are ignored."""

    kind: Kind
    required: bool
    description: str
    usual: tuple[Any, ...] | None = None
    refused: Refused | None = None

    def uses(self, value: Any) -> bool:
        """Return False if a value has no effect although the field is known."""
        return self.usual is None or any(type(value) is type(each) and value == each for each in self.usual)

    @property
    def is_hidden(self) -> bool:
        return self.refused is not None and self.kind.fits(None)

    def schema(self, found: dict[str, Schema]) -> Schema:
        schema = self.kind.schema(found)
        return {**schema, "description": self.description} if self.description else schema


@dataclass(slots=True, eq=False)
class _Object:
    """An object with declared fields.

    inline  maps the names of Inline fields to the fields that they collect
    kept    True if `read` keeps undeclared fields
    """

    name: str
    description: str
    fields: dict[str, _Field] = field(default_factory=dict)
    inline: dict[str, dict[str, _Field]] = field(default_factory=dict)
    kept: bool = False
    words: str = "an object"

    @property
    def all_fields(self) -> Mapping[str, _Field]:
        """The declared fields, including the fields that other code declares."""
        return ChainMap(self.fields, *self.inline.values())

    @property
    def is_refused(self) -> bool:
        """True if the server refuses every value of a required field."""
        needed = (each.refused for each in self.fields.values() if each.required)
        return any(refused is not None and not refused.accepted for refused in needed)

    def fits(self, value: Any) -> bool:
        return type(value) is dict

    def read(self, value: Any, place: str, ignored: list[str]) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(place, self.words, value)
        read = _read_fields(self.fields, value, place, ignored)
        # The client's order is kept, because some objects become part of the prompt.
        found = {
            name: read.get(name, each)
            for name, each in value.items()
            if name in read or (self.kept and each is not None)
        }
        for name, fields in self.inline.items():
            found[name] = _read_fields(fields, value, place, ignored)
        if not self.kept:
            known = self.all_fields
            unused = (name for name in value if name not in known or not known[name].uses(value[name]))
            ignored += [_path(place, name) for name in unused if value[name] is not None]
        return found

    def schema(self, found: dict[str, Schema]) -> Schema:
        if self.name.startswith("_"):
            return self._whole(found)
        if self.name not in found:
            found[self.name] = self._whole(found)
        return {"$ref": f"#/components/schemas/{self.name}"}

    def _whole(self, found: dict[str, Schema]) -> Schema:
        fields = self.all_fields
        whole: Schema = {"type": "object"}
        if self.description:
            whole["description"] = self.description
        if required := [name for name, each in fields.items() if each.required]:
            whole["required"] = required
        whole["properties"] = {name: each.schema(found) for name, each in fields.items() if not each.is_hidden}
        return whole


def _read_fields(
    fields: Mapping[str, _Field], value: Mapping[str, Any], place: str, ignored: list[str]
) -> dict[str, Any]:
    found = {}
    for name, each in fields.items():
        given = value.get(name)
        if given is None:
            if each.required:
                raise missing(_path(place, name))
        elif each.refused is not None and given not in each.refused.accepted:
            problem = f"{seen(given)} is not supported" if each.refused.accepted else "not supported"
            raise unsupported(_path(place, name), each.refused.problem or problem, hint=each.refused.advice)
        elif each.uses(given):
            found[name] = each.kind.read(given, _path(place, name), ignored)
    return found


@dataclass(slots=True, eq=False)
class _AnyOf:
    """A union of types. `tag` tells objects apart, and unions of objects that have other tags."""

    kinds: tuple[Kind, ...]
    words: str
    tag: Tagged | None = None

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        kinds = [kind for kind in self.kinds if kind.fits(value)]
        if not kinds:
            raise wrong_type(place, self.words, value)
        if self.tag is not None and type(value) is dict:
            if self.tag.default and not value.get(self.tag.name):
                value = {**value, self.tag.name: self.tag.default}
            return self._tagged(self.tag, value, place).read(value, place, ignored)
        if len(kinds) > 1 and value:  # the first item tells lists apart
            items = [kind.item for kind in kinds if isinstance(kind, _List)]
            kinds = [kind for kind, item in zip(kinds, items, strict=True) if item.fits(value[0])]
            if not kinds:
                raise wrong_type(f"{place}[0]", _either([item.words for item in items]), value[0])
        if isinstance(kinds[0], _Choice) and value not in kinds[0].values:
            raise wrong(place, self.words, value)
        return kinds[0].read(value, place, ignored)

    def _tagged(self, tag: Tagged, value: Mapping[str, Any], place: str) -> Kind:
        path, given = _path(place, tag.name), value.get(tag.name)
        if not given:
            raise missing(path)
        if type(given) is not str:
            raise wrong_type(path, "a string", given)
        tags = {kind: found for kind in self.kinds if (found := _field_of(kind, tag.name)) is not None}
        named = {name: kind for kind, each in tags.items() for name in getattr(each.kind, "values", ())}
        if given in named:
            return named[given]
        if tag.unknown:
            raise unsupported(place, tag.unknown.format(seen(given)), hint=tag.advice)
        supported = [name for name, kind in named.items() if tags[kind].refused is None]
        raise wrong(path, f"one of {', '.join(supported)}", given)

    def schema(self, found: dict[str, Schema]) -> Schema:
        kinds = [kind for kind in self.kinds if not (isinstance(kind, _Object) and kind.is_refused)]
        schemas = [kind.schema(found) for kind in kinds]
        return {"anyOf": schemas} if len(schemas) > 1 else schemas[0]


class _Null:
    """The value null, which only answers contain, because a field with the value null counts as missing."""

    words = "null"

    def fits(self, value: Any) -> bool:
        return value is None

    def read(self, value: Any, place: str, ignored: list[str]) -> None:
        return None

    def schema(self, found: dict[str, Schema]) -> Schema:
        return {"type": "null"}


def kind_of(declared: Any) -> Kind:
    """Return the kind of a type. Raises TypeError for types that no API uses."""
    marks: tuple[Any, ...] = ()
    if get_origin(declared) is Annotated:
        declared, *rest = get_args(declared)
        marks = tuple(rest)
    kind = _kind_of(declared, marks)
    for mark in marks:
        if isinstance(mark, Expected) and isinstance(kind, _Plain | _Choice | _List | _AnyOf):
            kind = replace(kind, words=mark.words)
        elif isinstance(mark, Keywords) and isinstance(kind, _Plain):
            kind = replace(kind, keywords={**kind.keywords, **mark.keywords})
    return kind


def _kind_of(declared: Any, marks: tuple[Any, ...]) -> Kind:
    origin, arguments = get_origin(declared), get_args(declared)
    limits = next((mark for mark in marks if isinstance(mark, Limits)), Limits())
    if declared is Any:
        return _Plain("any value", (), {})
    if declared is bool:
        return _Plain("true or false", (bool,), {"type": "boolean"})
    if declared in (int, float):
        return _number(declared, limits, next((mark.value for mark in marks if isinstance(mark, Without)), None))
    if declared is str:
        return _text(limits, next((mark for mark in marks if isinstance(mark, Matching)), None))
    if declared is type(None):
        return _Null()
    if origin is Literal:
        return _Choice(_one_of(arguments), arguments)
    if isinstance(declared, type) and issubclass(declared, Enum):
        values = tuple(member.value for member in declared)
        return _Choice(_one_of(values), values, declared)
    if origin is list:
        return _List(kind_of(arguments[0]), limits)
    if origin in (dict, Mapping):
        if get_origin(arguments[0]) is Literal:
            return _Object("_", "", {name: _field(arguments[1], required=True) for name in get_args(arguments[0])})
        return _Map(kind_of(arguments[1]))
    tag = next((mark for mark in marks if isinstance(mark, Tagged)), None)
    if origin in (Union, types.UnionType) or tag is not None:
        kinds = tuple(map(kind_of, arguments or [declared]))
        return _AnyOf(kinds, _either([kind.words for kind in kinds if not isinstance(kind, _Null)]), tag)
    if is_typeddict(declared):
        return _object(declared, kept=KEPT in marks)
    raise TypeError(f"no kind for {declared}")


def _one_of(values: Sequence[Any]) -> str:
    words = ", ".join(each if type(each) is str else seen(each) for each in values)
    return f"one of {words}" if len(values) > 1 else words


def _number(declared: type, limits: Limits, without: float | None) -> _Plain:
    low, high, is_integer = limits.low, limits.high, declared is int
    keywords = {"type": "integer" if is_integer else "number", **_limits("minimum", "maximum", limits)}
    if without is not None:
        keywords["not"] = {"const": without}
    if is_integer:
        high = min(high, MOST_INTEGER) if high == math.inf else high
        words = f"an integer of at least {low}" if high == MOST_INTEGER else f"an integer from {low} to {high}"
        return _Plain(words, (int,), keywords, low, high, without)
    words = f"a number from {low:g} to {high:g}" if math.isfinite(high) else "a number"
    largest = sys.float_info.max  # integers can be larger
    return _Plain(words, (int, float), keywords, max(low, -largest), min(high, largest), without)


def _text(limits: Limits, matching: Matching | None) -> _Plain:
    keywords = {"type": "string", **_limits("minLength", "maxLength", limits)}
    if matching is None:
        return _Plain("a string", (str,), keywords, limits.low, limits.high)
    return _Plain(
        matching.words,
        (str,),
        {**keywords, "pattern": f"^{matching.pattern}$"},
        limits.low,
        limits.high,
        pattern=matching.pattern,
    )


def _limits(lowest: str, highest: str, limits: Limits) -> Schema:
    given = {lowest: limits.low, highest: limits.high}
    return {keyword: limit for keyword, limit in given.items() if math.isfinite(limit)}


@cache
def _object(declared: Any, *, kept: bool) -> _Object:
    text = declared.__doc__ or ""
    found = _Object(declared.__name__, " ".join(text.split()), kept=kept)
    for name, hint in get_type_hints(declared, include_extras=True).items():
        required = name in declared.__required_keys__
        while get_origin(hint) in (Required, NotRequired):
            required = get_origin(hint) is Required
            [hint] = get_args(hint)
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        inline = next((mark for mark in marks if isinstance(mark, Inline)), None)
        if inline is not None:
            found.inline[name] = {each: _field(of, required=False) for each, of in inline.fields().items()}
        else:
            found.fields[name] = _field(hint, required=required)
    return found


def _field(hint: Any, *, required: bool) -> _Field:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [mark for mark in marks if type(mark) is str and mark is not KEPT]
    usual = next((mark.values for mark in marks if isinstance(mark, Usual)), None)
    refused = next((mark for mark in marks if isinstance(mark, Refused)), None)
    return _Field(kind_of(hint), required, texts[-1] if texts else "", usual, refused)


def _field_of(kind: Kind, name: str) -> _Field | None:
    """Return the field of an object, or of the first object in a union; None for other kinds."""
    if isinstance(kind, _AnyOf):
        return _field_of(kind.kinds[0], name)
    return kind.fields[name] if isinstance(kind, _Object) else None


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _either(words: list[str]) -> str:
    """Return a list of alternatives, such as "a, b or c"."""
    different = [*dict.fromkeys(words)]
    return " or ".join([", ".join(different[:-1]), different[-1]] if len(different) > 1 else different)


def agreed(given: Mapping[str, T]) -> T | None:
    """Return the common value of several fields, or None if no fields are given. Raises InvalidField if values differ.

    given  maps fields with the same meaning to their values
    """
    names = [*given]
    for name in names[1:]:
        if given[name] != given[names[0]]:
            raise InvalidField(name, f"contradicts {names[0]}", hint="send only one of these fields")
    return given[names[0]] if names else None


def missing(path: str) -> InvalidField:
    """Return the error for a required field that is missing."""
    return InvalidField(path, "this field is required", code="missing_required_parameter")


def wrong(path: str, wanted: str, value: Any) -> InvalidField:
    """Return the error for a value that the API does not accept."""
    return InvalidField(path or None, f"expected {wanted}, got {seen(value)}")


def wrong_type(path: str, wanted: str, value: Any) -> InvalidField:
    """Return the error for a value of the wrong type."""
    return InvalidField(path or None, f"expected {wanted}, got {seen(value)}", code="invalid_type")


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
