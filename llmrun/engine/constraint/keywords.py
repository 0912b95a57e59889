"""Finds keywords and references in JSON Schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_SCHEMA = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP_OF_SCHEMAS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")

_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
_OLDEST = _DRAFTS.index("draft-04")
LATEST: Final = len(_DRAFTS) - 1
REFERENCES_WITH_SIBLINGS: Final = _DRAFTS.index("2019-09")  # older drafts ignore the keywords beside a `$ref`
# Keywords that describe a value and never restrict the value
ANNOTATIONS: Final = frozenset(
    (
        *("$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description"),
        *("examples", "readOnly", "title", "writeOnly"),
    )
)
# The draft that introduced a keyword. llguidance ignores a keyword that is not part of the schema's draft.
_INTRODUCED = {
    **dict.fromkeys(("const", "contains", "propertyNames"), _DRAFTS.index("draft-06")),
    **dict.fromkeys(("if", "then", "else"), _DRAFTS.index("draft-07")),
    **dict.fromkeys(
        (
            *("$recursiveRef", "dependentRequired", "dependentSchemas", "maxContains", "minContains"),
            *("unevaluatedItems", "unevaluatedProperties"),
        ),
        _DRAFTS.index("2019-09"),
    ),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), _DRAFTS.index("2020-12")),
}
_REMOVED = ("disallow", "divisibleBy", "extends")  # keywords that exist only in draft-03
# The control characters that a JSON string can contain only as \u escapes, which matcher.py does not allow. llguidance
# would omit such characters from a constant or from a literal in a pattern, but handles character classes correctly.
_CONTROLS = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
_CODE = "0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_ATOM = re.compile(r"\\(?:[xu]\{\w*\}|x\w\w|u\w{4}|.)|.", re.DOTALL)  # a character of a pattern, or an escape sequence
_CONTROL_ATOM = re.compile(rf"{_CONTROLS}|\\[av]|\\[xu](?:{_CODE}|\{{{_CODE}\}})")
_EXACT = 1 << 53  # llguidance stores numbers as doubles, which represent all integers up to this limit


def subschemas(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every subschema that is an object, with its place. The place of the schema itself is ""."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword, value in schema.items():
        here = f"{place}/{escaped(keyword)}"
        if keyword in _SCHEMA:
            yield from subschemas(value, here)
        for name, part in _parts(keyword, value):
            yield from subschemas(part, f"{here}/{escaped(name)}")


def _parts(keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a list or in a map of schemas."""
    if keyword in _LIST_OF_SCHEMAS and isinstance(value, list):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif keyword in _MAP_OF_SCHEMAS and isinstance(value, dict):
        yield from value.items()


def as_list(value: Any) -> list[Any]:
    """Return the value of a keyword that is a list or a single item."""
    return value if isinstance(value, list) else [value]


def escaped(name: str) -> str:
    """Escape a key for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def place_of(schema: Any, keyword: str, value: object = ...) -> str | None:
    """Return the first place where a keyword occurs (with `value`, if a value is given), or None."""
    for place, found in subschemas(schema):
        if keyword in found and (value is ... or found[keyword] == value):
            return f"{place}/{escaped(keyword)}"
    return None


def draft_of(schema: Mapping[str, Any]) -> int:
    """Return the index in _DRAFTS of the draft that "$schema" declares; the default is the latest draft."""
    declared = str(schema.get("$schema", ""))
    return next((number for number, name in enumerate(_DRAFTS) if name in declared), LATEST)


_DIALECTS = {  # the names of dialects that llguidance and jsonschema know
    **{number: f"http://json-schema.org/{_DRAFTS[number]}/schema#" for number in range(_OLDEST, 4)},
    **{number: f"https://json-schema.org/draft/{_DRAFTS[number]}/schema" for number in range(4, len(_DRAFTS))},
}


def modernize(schema: dict[str, Any]) -> None:
    """Change a schema to the usual spelling of its dialect, in place.

    Unknown dialects are removed, because llguidance would try to fetch their descriptions. Schemas without a known
    "$schema" may use draft-07's lists in `items`, and the boolean limits of draft-04 and OpenAPI 3.0.
    """
    if any(name in str(schema.get("$schema")) for name in _DRAFTS[_OLDEST:]):
        schema["$schema"] = _DIALECTS[draft_of(schema)]
        return
    schema.pop("$schema", None)
    for _, found in subschemas(schema):
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            if "additionalItems" in found:
                found["items"] = found.pop("additionalItems")
            if not found["prefixItems"]:
                del found["prefixItems"]
        for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and limit in found:
                found[exclusive] = found.pop(limit)


_LONGEST_PATH = 20  # number of references to follow before a schema is considered circular
_LONGEST_POINTER = 200  # steps; a schema has at most 100 levels, of up to two steps each


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow the `$ref` of a schema inside the root schema. Returns {}, which allows everything, if that fails."""
    return References(root).resolved(schema)


class References:
    """Resolves the references inside one schema. Each pointer is followed once, because schemas come from anywhere."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}

    def resolved(self, schema: Any) -> Any:
        """Follow the `$ref` of a schema. Returns {}, which allows everything, if that fails."""
        for _ in range(_LONGEST_PATH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema
            if reference not in self._targets:
                self._targets[reference] = _referenced(reference, self._root)
            schema = self._targets[reference]
        return {}


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a `$ref` inside the root schema. Returns {} if the target is unknown."""
    steps = pointer_steps(reference)
    if steps is None:
        return {}
    target: Any = root
    for step in steps:
        target = child(target, step)
    return target


def pointer_steps(reference: str) -> list[str] | None:
    """Return the steps of a `$ref` inside the root schema, as written, or None for other and for long references."""
    is_inside = reference == "#" or reference.startswith("#/")
    return reference.split("/")[1:] if is_inside and reference.count("/") <= _LONGEST_POINTER else None


def child(target: Any, step: str) -> Any:
    """Return the part of a schema to which a step of a `$ref` leads. Returns {} if there is none."""
    from urllib.parse import unquote

    key = unquote(step).replace("~1", "/").replace("~0", "~")
    if isinstance(target, list):
        is_index = len(key) < 10 and key.isascii() and key.isdecimal() and int(key) < len(target)
        return target[int(key)] if is_index else {}
    return target.get(key, {}) if isinstance(target, Mapping) else {}


class WorkLimit:
    """Limits the work on one schema, because schemas come from anywhere."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Count steps. Raises ValueError if there are too many."""
        self._left -= steps
        if self._left < 0:
            raise ValueError("too many schemas are composed")


def ignored(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield (place, reason) for every keyword that llguidance would silently ignore or apply inexactly."""
    if not isinstance(schema, dict):
        return
    draft = draft_of(schema)
    if draft < _OLDEST:
        yield "/$schema", f"{_DRAFTS[draft]} is not supported, the oldest is {_DRAFTS[_OLDEST]}"
    if "x-guidance" in schema:
        yield "/x-guidance", "compiler options cannot be part of the schema"
    for place, found in subschemas(schema):
        for keyword, value in found.items():
            here = f"{place}/{escaped(keyword)}"
            if draft < _INTRODUCED.get(keyword, 0):
                yield here, f'"{keyword}" has no effect in {_DRAFTS[draft]}, which "$schema" declares'
            elif keyword in _REMOVED:
                yield here, f'"{keyword}" has no effect since {_DRAFTS[_OLDEST]}'
            elif keyword in ("const", "enum") and _beyond_exact(value):
                yield here, f"integers beyond {_EXACT:,} cannot be matched exactly"
            elif _demands_control(keyword, value):
                yield here, "control characters other than \\b, \\f, \\n, \\r and \\t cannot be matched"


def _beyond_exact(value: Any) -> bool:
    return any(isinstance(each, int) and abs(each) > _EXACT for each in _scalars(value))


def _demands_control(keyword: str, value: Any) -> bool:
    """Return True if a keyword demands a control character that no answer can contain."""
    if keyword in ("const", "enum"):
        return any(isinstance(each, str) and re.search(_CONTROLS, each) for each in _scalars(value))
    named = keyword == "patternProperties" and isinstance(value, dict)
    patterns = value if named else [value] if keyword == "pattern" else []
    atoms = (atom for pattern in patterns if isinstance(pattern, str) for atom in _literals(pattern))
    return any(map(_CONTROL_ATOM.fullmatch, atoms))


def _literals(pattern: str) -> Iterator[str]:
    """Yield the characters of a pattern that are outside of classes or alone in a class."""
    members: list[str] | None = None
    for atom in _ATOM.findall(pattern):
        if members is None and atom != "[":
            yield atom
        elif members is None:
            members = []
        elif atom != "]":
            members.append(atom)
        else:
            yield from members if len(members) == 1 else ()
            members = None


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the values in nested objects and lists."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _scalars(part)
    else:
        yield value
