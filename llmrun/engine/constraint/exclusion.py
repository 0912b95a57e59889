"""Proves that the options of a `oneOf` are disjoint, so that `anyOf` allows the same answers.

llguidance proves this only for options without references. Some disjoint options are not recognized, but options that
overlap are never called disjoint. The number of steps is limited, because schemas are untrusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final

from llmrun.engine.constraint.keywords import REFERENCES_WITH_SIBLINGS, References, draft_of

_TYPES: Final = frozenset({"array", "boolean", "null", "number", "object", "string"})  # integers are numbers
_LIMITS: Final = {  # for each type, the keywords with the lowest and the highest value of one quantity
    "array": ("minItems", "maxItems"),
    "number": ("minimum", "maximum"),
    "object": ("minProperties", "maxProperties"),
    "string": ("minLength", "maxLength"),
}
_MOST_STEPS: Final = 100_000  # compared schemas, values and names, which take 0.5 s
_DEEPEST: Final = 8
_MOST_CONJUNCTS: Final = 20


class Exclusion:
    """Compares subschemas of one root schema, in which references are resolved."""

    def __init__(self, root: Mapping[str, Any], schemas: Iterable[Mapping[str, Any]]) -> None:
        """`schemas` are the root and all its subschemas."""
        self._references = References(root)
        self._siblings_count = draft_of(root) >= REFERENCES_WITH_SIBLINGS
        # References inside a subschema with an "$id" of its own are relative to this subschema.
        self._provable = not any(found.keys() & {"$id", "id"} for found in schemas if found is not root)
        self._steps = 0

    def is_exclusive(self, found: Mapping[str, Any]) -> bool:
        """Return True if no value can match two options of the schema's `oneOf`."""
        options = found.get("oneOf")
        if not isinstance(options, list) or not self._provable:
            return False
        around = {"type": found["type"]} if "type" in found else {}
        return all(self._are_disjoint(first, second, around, 0) for first, second in combinations(options, 2))

    def _are_disjoint(self, first: Any, second: Any, around: Mapping[str, Any], depth: int) -> bool:
        """Return True if no value can match both schemas and `around`."""
        self._steps += 1
        if depth > _DEEPEST or self._steps > _MOST_STEPS:
            return False
        left, right = self._conjuncts(first), self._conjuncts(second)
        both = [around, *left, *right]
        if any(each is False for each in both):
            return True
        parts = [each for each in both if isinstance(each, Mapping)]
        kinds = frozenset.intersection(*map(_types, parts))
        return (
            not kinds
            or self._values_are_disjoint(parts)
            or (len(kinds) == 1 and _limits_are_disjoint(parts, *kinds))
            or (kinds == {"object"} and self._properties_are_disjoint(left, right, depth))
            or self._options_are_disjoint(left, second, around, depth)
            or self._options_are_disjoint(right, first, around, depth)
        )

    def _conjuncts(self, schema: Any) -> list[Any]:
        """Return the parts of a schema, by `allOf` and `$ref`, all of which its values match."""
        found: list[Any] = []
        waiting = [schema]
        while waiting and len(found) < _MOST_CONJUNCTS:
            part = waiting.pop()
            if not isinstance(part, Mapping):
                found.append(part)
                continue
            self._steps += 1 + len(_list(part, "enum")) + len(_list(part, "required"))
            refers = isinstance(part.get("$ref"), str)
            if refers:
                waiting.append(self._references.resolved(part))
            if self._siblings_count or not refers:
                found.append(part)
                waiting += _list(part, "allOf")
        return found

    def _values_are_disjoint(self, parts: Sequence[Mapping[str, Any]]) -> bool:
        listed = [values for part in parts if (values := _values(part)) is not None]
        self._steps += sum(map(len, listed))
        return len(listed) > 1 and not frozenset.intersection(*listed)

    def _properties_are_disjoint(self, left: Sequence[Any], right: Sequence[Any], depth: int) -> bool:
        """Return True if the schemas of a required property are disjoint."""
        names = dict.fromkeys(
            name for part in (*left, *right) for name in _list(part, "required") if isinstance(name, str)
        )
        pairs = [(one, other) for one, other in product(left, right) if _declares(one) or _declares(other)]
        return any(
            self._are_disjoint(_property(one, name), _property(other, name), {}, depth + 1)
            for name in names
            for one, other in pairs
        )

    def _options_are_disjoint(self, parts: Sequence[Any], other: Any, around: Mapping[str, Any], depth: int) -> bool:
        """Return True if one of the parts has only options that are disjoint from the other schema."""
        return any(
            all(self._are_disjoint(option, other, around, depth + 1) for option in options)
            for part in parts
            for keyword in ("anyOf", "oneOf")
            if (options := _list(part, keyword))
        )


def _list(part: Any, keyword: str) -> list[Any]:
    value = part.get(keyword) if isinstance(part, Mapping) else None
    return value if isinstance(value, list) else []


def _declares(part: Any) -> bool:
    return isinstance(part, Mapping) and ("properties" in part or "additionalProperties" in part)


def _property(part: Any, name: str) -> Any:
    """Return the schema that a part of an object's schema sets for a property, or True if the schema is unknown."""
    if not isinstance(part, Mapping):
        return part
    properties = part.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if "patternProperties" in part else part.get("additionalProperties", True)


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the values that a schema may allow."""
    given = part.get("type", [*_TYPES])
    given = [given] if isinstance(given, str) else given if isinstance(given, list) else [*_TYPES]
    found = frozenset("number" if each == "integer" else str(each) for each in given)
    values = [part["const"]] if "const" in part else part.get("enum")
    return found & frozenset(map(_type_of, values)) if isinstance(values, list) else found


def _type_of(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return "boolean" if isinstance(value, bool) else "number"
    if isinstance(value, list | dict):
        return "array" if isinstance(value, list) else "object"
    return "string" if isinstance(value, str) else "null"


def _values(part: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
    """Return the (type, value) of each value that a schema lists. Returns None without a list of simple values."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if not isinstance(values, list) or any(isinstance(each, list | dict) for each in values):
        return None
    return frozenset((_type_of(each), each) for each in values)


def _limits_are_disjoint(parts: Sequence[Mapping[str, Any]], kind: str) -> bool:
    if kind not in _LIMITS:
        return False
    low, high = _LIMITS[kind]
    lows, highs = [*_numbers(parts, low)], [*_numbers(parts, high)]
    return bool(lows and highs) and max(lows) > min(highs)


def _numbers(parts: Sequence[Mapping[str, Any]], keyword: str) -> Iterator[float]:
    for part in parts:
        value = part.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
