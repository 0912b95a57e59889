"""Reads and describes the JSON objects of APIs, each of which is declared once, as a TypedDict.

    class Tool(TypedDict, total=False):
        type: Literal["function"]
        function: Required[Function]
        strict: Annotated[bool, "Refuse the tool if its schema cannot be enforced."]

`read` converts the body of a request to a declared object, and reports the fields that have no effect. `schemas`
returns the JSON schemas of declared objects. A field with the value null counts as missing.

A string in `Annotated` is the description of the field. `Annotated` may also contain KEPT and the classes from `Limits`
to `Keywords`. Types whose names begin with an underscore are described in place in the OpenAPI document.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NotRequired,
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

    noun     what a list contains, for messages
    without  a number within the limits that is not allowed
    """

    low: float = -math.inf
    high: float = math.inf
    noun: str = "item"
    without: float | None = None

    def allow(self, value: float) -> bool:
        return self.low <= value <= self.high and value != self.without

    def keywords(self, lowest: str, highest: str) -> Schema:
        """Return the keywords of a JSON schema for these limits, under the given names."""
        given = {lowest: self.low, highest: self.high}
        found: Schema = {keyword: limit for keyword, limit in given.items() if math.isfinite(limit)}
        return found if self.without is None else {**found, "not": {"const": self.without}}


class Matching(NamedTuple):
    """A string that matches a regular expression. `words` describe the expected string in messages."""

    pattern: str
    words: str


class Expected(NamedTuple):
    """The words that describe the expected value in messages."""

    words: str


class Usual(NamedTuple):
    """The values of a field that match the server's behavior. All other values are ignored and reported."""

    values: tuple[Any, ...]


class Refused(NamedTuple):
    """A field for which only the accepted values are allowed. If the field's type is Any, the schema omits the field.

    problem  the message for other values; by default, the message says that the value is not supported
    """

    accepted: tuple[Any, ...] = ()
    advice: str = ""
    problem: str = ""


class Tagged(NamedTuple):
    """A union of objects that differ in the values of the field `name`.

    One of the objects may allow any string in this field. It then describes all values that no other object has.

    default  the value that `read` sets if the field is missing, or "" if the field is required
    unknown  the message for other values, with {} for the value; by default, the message lists the possible values
    advice   the hint for other values
    """

    name: str
    default: str = ""
    unknown: str = ""
    advice: str = ""


class Inline(NamedTuple):
    """Additional fields of the JSON object, declared by other code. `read` collects them in a separate dictionary.

    fields  returns the types of the fields by name
    """

    fields: Callable[[], Mapping[str, Any]]


class Keywords(NamedTuple):
    """Additional keywords of the JSON schema."""

    keywords: Mapping[str, Any]


KEPT: Final = "kept"  # marks an object whose undeclared fields are kept for chat templates


def read(declared: type[T], body: Mapping[str, Any], place: str = "") -> tuple[T, tuple[str, ...]]:
    """Return the declared fields of an object, and the paths of fields that have no effect. Raises InvalidField.

    Errors contain the path of the field, such as "stream_options.include_usage". The paths of ignored fields have no
    indexes, as in "messages[].cache_control".

    declared  a TypedDict
    place     the path of the object in the body, which is "" for the body itself
    """
    ignored: list[str] = []
    found: T = kind_of(declared).read(body, place, ignored)
    in_order = sorted(ignored, key=lambda path: path.count(".") + path.count("["))
    return found, tuple(dict.fromkeys(map(without_indexes, in_order)))


def without_indexes(path: str) -> str:
    """Return the path of a field with empty brackets, as in "messages[].cache_control"."""
    return _INDEX.sub("[]", path)


def schemas(*declared: Any) -> dict[str, Schema]:
    """Return the JSON schemas of types by name, including the schemas that they refer to."""
    found: dict[str, Schema] = {}
    for each in declared:
        kind_of(each).schema(found)
    return found


@dataclass(slots=True, eq=False)
class Kind:
    """The set of JSON values that a type allows.

    words     describes an allowed value, for messages
    types     the Python types of the values; () for any value
    check     returns an allowed value of one of these types, and raises InvalidField for other values; the arguments
              are the value, the value's path, and a list that receives the paths of fields without effect
    schema    returns the JSON schema, and adds the schemas of named objects to the argument
    literals  the only allowed values, or () if other values are allowed
    items     the kind of a list's items
    members   the kinds of a union
    fields    the fields of an object
    """

    words: str
    types: tuple[type, ...]
    check: Callable[[Any, str, list[str]], Any]
    schema: Callable[[dict[str, Schema]], Schema]
    literals: tuple[Any, ...] = ()
    items: Kind | None = None
    members: Sequence[Kind] = ()
    fields: Mapping[str, _Field] = field(default_factory=dict)

    def fits(self, value: Any) -> bool:
        """Return whether a value has the right type."""
        return not self.types or type(value) in self.types

    @property
    def is_refused(self) -> bool:
        """True for objects with a required field for which the server refuses every value."""
        needed = (each.refused for each in self.fields.values() if each.required)
        return any(refused is not None and not refused.accepted for refused in needed)

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        """Check and convert a value. Raises InvalidField for values that are not allowed."""
        if not self.fits(value):
            raise wrong_type(place, self.words, value)
        return self.check(value, place, ignored)


def kind_of(declared: Any) -> Kind:
    """Return the kind of a type. Raises TypeError for types that no API uses."""
    marks: dict[type, Any] = {}
    if get_origin(declared) is Annotated:
        declared, *rest = get_args(declared)
        marks = {type(mark): mark for mark in rest if mark != KEPT}
        if KEPT in rest:
            return _object(declared, kept=True)
    kind = _kind_of(declared, marks)
    if Expected in marks:
        kind.words = marks[Expected].words
    if Keywords in marks:
        keywords = {**kind.schema({}), **marks[Keywords].keywords}
        kind.schema = lambda found: keywords
    return kind


def _kind_of(declared: Any, marks: Mapping[type, Any]) -> Kind:
    origin, arguments = get_origin(declared), get_args(declared)
    limits: Limits = marks.get(Limits, Limits())
    if origin in (Union, types.UnionType) or Tagged in marks:
        return _union([kind_of(each) for each in arguments or [declared]], marks.get(Tagged))
    if declared in (bool, Any):
        return _anything(declared)
    if declared in (int, float):
        return _number(declared, limits)
    if declared is str:
        return _text(limits, marks.get(Matching, Matching("", "a string")))
    if declared is type(None):
        return Kind("null", (type(None),), lambda value, *_: value, lambda found: {"type": "null"})
    if origin is Literal:
        return _choice(arguments)
    if origin is list:
        return _list(kind_of(arguments[0]), limits)
    if origin in (dict, Mapping):
        return _map(arguments[0], arguments[1])
    if is_typeddict(declared):
        return _object(declared, kept=False)
    if issubclass(declared, Enum):
        return _choice([member.value for member in declared], declared)
    raise TypeError(f"no kind for {declared}")


def _anything(declared: Any) -> Kind:
    if declared is bool:
        return Kind("true or false", (bool,), lambda value, *_: value, lambda found: {"type": "boolean"})
    return Kind("any value", (), lambda value, *_: value, lambda found: {})


def _number(declared: type, limits: Limits) -> Kind:
    low, high = limits.low, limits.high
    if declared is int:
        high = MOST_INTEGER if high == math.inf else high
        words = f"an integer of at least {low}" if high == MOST_INTEGER else f"an integer from {low} to {high}"
    else:
        words = f"a number from {low:g} to {high:g}" if math.isfinite(high) else "a number"
        low, high = max(low, -sys.float_info.max), min(high, sys.float_info.max)  # an integer can exceed this range
    allowed = limits._replace(low=low, high=high)

    def check(value: Any, place: str, ignored: list[str]) -> Any:
        if not allowed.allow(value):
            is_huge = value > MOST_INTEGER and declared is int and math.isinf(limits.high)
            raise wrong(place, f"an integer of at most {MOST_INTEGER:,}" if is_huge else kind.words, value)
        return declared(value)

    schema = {"type": "integer" if declared is int else "number", **limits.keywords("minimum", "maximum")}
    kind = Kind(words, (int,) if declared is int else (int, float), check, lambda found: schema)
    return kind


def _text(limits: Limits, matching: Matching) -> Kind:
    def check(text: str, place: str, ignored: list[str]) -> str:
        if not limits.allow(len(text)):
            if math.isinf(limits.high):
                raise wrong(place, "a text that is not empty", text)
            words = f"{max(limits.low, 0):.0f} to {limits.high:,.0f} characters"
            raise InvalidField(place, f"expected {words}, got {len(text):,}")
        if matching.pattern and not re.fullmatch(matching.pattern, text):
            raise wrong(place, kind.words, text)
        return text

    schema = {"type": "string", **limits.keywords("minLength", "maxLength")}
    if matching.pattern:
        schema["pattern"] = f"^{matching.pattern}$"
    kind = Kind(matching.words, (str,), check, lambda found: schema)
    return kind


def _choice(values: Sequence[Any], member: Callable[[Any], Any] = lambda value: value) -> Kind:
    """Return the kind of literal values. `member` converts a value, for example to a member of an enumeration."""
    named = ", ".join(each if type(each) is str else seen(each) for each in values)

    def check(value: Any, place: str, ignored: list[str]) -> Any:
        if value not in values:
            raise wrong(place, kind.words, value)
        return member(value)

    schema = {"const": values[0]} if len(values) == 1 else {"enum": [*values]}
    words = f"one of {named}" if len(values) > 1 else named
    kind = Kind(words, tuple({type(each) for each in values}), check, lambda found: schema, tuple(values))
    return kind


def _list(item: Kind, limits: Limits) -> Kind:
    low, high, noun, _ = limits

    def check(value: list[Any], place: str, ignored: list[str]) -> list[Any]:
        if len(value) < low:
            raise InvalidField(place, f"expected at least one {noun}, got an empty list")
        if len(value) > high:
            raise InvalidField(place, f"{len(value):,} {noun}s are too many; the limit is {high:,}")
        whole = next((kind for kind in (item, *item.members) if kind.types == (int,)), None)
        if whole is not None and set(map(type, value)) == {int}:
            for each in (min(value), max(value)):  # checking millions of token IDs one by one would take seconds
                whole.read(each, f"{place}[{value.index(each)}]", ignored)
            return value
        return [item.read(each, f"{place}[{number}]", ignored) for number, each in enumerate(value)]

    keywords = limits.keywords("minItems", "maxItems")
    return Kind(
        "a list",
        (list,),
        check,
        lambda found: {"type": "array", "items": item.schema(found), **keywords},
        items=item,
    )


def _map(key: Any, declared: Any) -> Kind:
    """Return the kind of an object whose values have one type, with any names or with the literal names of `key`."""
    if get_origin(key) is Literal:
        return _object_of("_", "", {name: _field(declared, required=True) for name in get_args(key)})
    kind = kind_of(declared)

    def check(value: dict[str, Any], place: str, ignored: list[str]) -> dict[str, Any]:
        given = {name: each for name, each in value.items() if each is not None or kind.fits(None)}
        shown_names = {name: shown(name, _LONGEST_SHOWN) for name in given}
        return {name: kind.read(each, f"{place}.{shown_names[name]}", ignored) for name, each in given.items()}

    def schema(found: dict[str, Schema]) -> Schema:
        others = kind.schema(found)
        return {"type": "object", **({"additionalProperties": others} if others else {})}

    return Kind("an object", (dict,), check, schema)


def _union(kinds: Sequence[Kind], tag: Tagged | None) -> Kind:
    """Return the kind of a union. `tag` distinguishes objects, and nested unions whose objects have other tags."""

    def check(value: Any, place: str, ignored: list[str]) -> Any:
        if tag is not None and type(value) is dict:
            if tag.default and value.get(tag.name) is None:
                value = {**value, tag.name: tag.default}
            return _tagged(named, tag, value, place, others).read(value, place, ignored)
        fitting = [kind for kind in kinds if kind.fits(value)]
        if len(fitting) > 1 and value:  # the first item decides between kinds of lists
            items = [kind.items for kind in fitting if kind.items is not None]
            fitting = [kind for kind in fitting if kind.items is not None and kind.items.fits(value[0])]
            if not fitting:
                raise wrong_type(f"{place}[0]", _either(item.words for item in items), value[0])
        if fitting[0].literals and value not in fitting[0].literals:
            raise wrong(place, union.words, value)
        return fitting[0].read(value, place, ignored)

    def schema(found: dict[str, Schema]) -> Schema:
        schemas = [kind.schema(found) for kind in kinds if not kind.is_refused]
        return {"anyOf": schemas} if len(schemas) > 1 else schemas[0]

    tagged = [kind for kind in kinds if tag is not None and tag.name in kind.fields]
    named = {name: kind for kind in tagged for name in kind.fields[tag.name].kind.literals} if tag else {}
    others = next((kind for kind in tagged if tag is not None and not kind.fields[tag.name].kind.literals), None)
    all_types = tuple(each for kind in kinds for each in kind.types)
    fields = kinds[0].fields  # all objects contain the field of the tag
    union = Kind(_either(kind.words for kind in kinds if kind.types != (type(None),)), all_types, check, schema)
    union.fields, union.members = fields, kinds
    return union


def _tagged(named: Mapping[str, Kind], tag: Tagged, value: Mapping[str, Any], place: str, others: Kind | None) -> Kind:
    """Return the kind of an object in a union, by the object's tag. Raises InvalidField for unknown tags.

    named   maps the values of the tag to kinds
    others  the kind of objects whose tag has another value, or None
    """
    path, given = _path(place, tag.name), value.get(tag.name)
    if given is None:
        raise missing(path)
    if type(given) is not str:
        raise wrong_type(path, "a string", given)
    if given in named:
        return named[given]
    if others is not None:
        return others
    if tag.unknown:
        raise unsupported(place, tag.unknown.format(seen(given)), hint=tag.advice)
    supported = [name for name, kind in named.items() if kind.fields[tag.name].refused is None]
    raise wrong(path, f"one of {', '.join(supported)}", given)


@dataclass(slots=True)
class _Field:
    """A field of an object. `usual` contains the only values that are not ignored, or is None.

    inline  the name under which `read` collects the field, or "" for a field of the object itself
    """

    kind: Kind
    required: bool
    description: str
    usual: tuple[Any, ...] | None = None
    refused: Refused | None = None
    inline: str = ""

    def uses(self, value: Any) -> bool:
        """Return False for a value that the server ignores."""
        return self.usual is None or any(type(value) is type(each) and value == each for each in self.usual)

    def read(self, value: Any, place: str, ignored: list[str]) -> Any:
        refused = self.refused
        if refused is not None and value not in refused.accepted:
            problem = f"{seen(value)} is not supported" if refused.accepted else "not supported"
            raise unsupported(place, refused.problem or problem, hint=refused.advice)
        return self.kind.read(value, place, ignored)

    def schema(self, found: dict[str, Schema]) -> Schema:
        schema = self.kind.schema(found)
        return {**schema, "description": self.description} if self.description else schema


def _field(hint: Any, *, required: bool, inline: str = "") -> _Field:
    marks = {type(mark): mark for mark in get_args(hint)[1:]} if get_origin(hint) is Annotated else {}
    usual, text = marks.get(Usual), marks.get(str, "")
    return _Field(
        kind_of(hint),
        required,
        "" if text == KEPT else text,
        None if usual is None else usual.values,
        marks.get(Refused),
        inline,
    )


@cache
def _object(declared: Any, *, kept: bool) -> Kind:
    fields: dict[str, _Field] = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        required = name in declared.__required_keys__
        while get_origin(hint) in (Required, NotRequired):
            required = get_origin(hint) is Required
            [hint] = get_args(hint)
        inline = [mark for mark in get_args(hint) if isinstance(mark, Inline)]
        if inline:
            fields |= {each: _field(of, required=False, inline=name) for each, of in inline[0].fields().items()}
        else:
            fields[name] = _field(hint, required=required)
    return _object_of(declared.__name__, " ".join((declared.__doc__ or "").split()), fields, kept=kept)


def _object_of(name: str, description: str, fields: Mapping[str, _Field], *, kept: bool = False) -> Kind:
    """Return the kind of an object. `kept` is True if undeclared fields are kept instead of ignored."""
    groups = {each.inline for each in fields.values()} - {""}
    required = [name for name, each in fields.items() if each.required]

    def check(value: dict[str, Any], place: str, ignored: list[str]) -> dict[str, Any]:
        # The client's order is kept, because some objects become part of the prompt.
        found: dict[str, Any] = {group: {} for group in groups}
        for name, given in value.items():
            known = fields.get(name)
            if given is None:
                continue
            if known is not None and known.uses(given):
                group = found[known.inline] if known.inline else found
                group[name] = known.read(given, f"{place}.{name}" if place else name, ignored)
            elif kept:
                found[name] = given
            else:
                ignored.append(_path(place, name))
        for name in required:
            if name not in found:
                raise missing(_path(place, name))
        return found

    def whole(found: dict[str, Schema]) -> Schema:
        shown_fields = {name: each for name, each in fields.items() if each.refused is None or each.kind.types}
        return {
            "type": "object",
            **({"description": description} if description else {}),
            **({"required": required} if required else {}),
            "properties": {name: each.schema(found) for name, each in shown_fields.items()},
        }

    def schema(found: dict[str, Schema]) -> Schema:
        if name.startswith("_"):
            return whole(found)
        if name not in found:
            found[name] = whole(found)
        return {"$ref": f"#/components/schemas/{name}"}

    return Kind("an object", (dict,), check, schema, fields=fields)


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _either(words: Iterable[str]) -> str:
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
