"""Rewrites JSON Schemas with keywords that llguidance enforces, so that they allow the same answers.

Schema generators write keywords that have no effect (`"uniqueItems": false`), `oneOf` over references, and maps with
a list of keys (`propertyNames` with an `enum`). llguidance refuses all of these. A keyword that cannot be replaced
exactly remains, and llguidance refuses the schema. The values of keywords may be malformed here, because the isolated
process validates the schema against its metaschema later.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from llmrun.engine.constraint.closing import declare_all
from llmrun.engine.constraint.exclusion import Exclusion
from llmrun.engine.constraint.keywords import (
    ANNOTATIONS,
    References,
    WorkLimit,
    as_list,
    child,
    modernize,
    pointer_steps,
    subschemas,
)
from llmrun.engine.constraint.patterns import listed_texts, replace_format

_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_NUMBERS = frozenset((*_COUNTS, "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"))
_TYPES = {  # maps keywords that llguidance refuses to the type of the values that they restrict
    **dict.fromkeys(("contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"), "array"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas", "maxProperties"), "object"),
    **dict.fromkeys(("minProperties", "propertyNames", "unevaluatedProperties"), "object"),
}
_MOST_DECLARED: Final = 100_000  # names that are declared in addition, in all objects together; they take 0.1 s
_EMPTY: Final[tuple[Any, ...]] = ({}, [], True)  # conditions of `dependencies` and similar keywords that always hold
# The largest double below 2**63. llguidance refuses larger bounds of numbers, and lower bounds of -2**63.
_LARGEST: Final = (1 << 63) - 1024


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema that allows the same answers, and that llguidance supports if possible.

    Some answers are left out: leap seconds, and the largest numbers if the schema has bounds beyond 2**63. Raises
    ValueError if too many names must be declared, and ValueError, TypeError or RecursionError if the schema is not
    JSON.
    """
    root: dict[str, Any] = json.loads(json.dumps(dict(schema)))
    modernize(root)
    schemas = [found for _, found in subschemas(root)]
    exclusion, references, limit = Exclusion(root, schemas), References(root), WorkLimit(_MOST_DECLARED)
    renamed = [found for found in schemas if "anyOf" not in found and exclusion.is_exclusive(found)]
    for found in schemas:
        _replace_numbers(found)
        replace_format(found)
        _remove_ineffective(found, references)
        _close(found, references, limit)
        _list_names(found, references, limit)
        _list_patterns(found, limit)
    for found in renamed:
        if "oneOf" in found:
            _replace_entry(found, "oneOf", "anyOf", found["oneOf"])
    if renamed:
        for found in schemas:
            if isinstance(found.get("$ref"), str):
                found["$ref"] = _renamed_reference(found["$ref"], root)
    return root


def _replace_entry(found: dict[str, Any], old: str, new: str, value: Any) -> None:
    """Replace an entry in its place, because llguidance derives the order of properties from the order of keywords."""
    entries = [(new, value) if keyword == old else (keyword, each) for keyword, each in found.items()]
    found.clear()
    found.update(entries)


def _renamed_reference(reference: str, root: dict[str, Any]) -> str:
    """Return a reference that passes through `anyOf` where there is no `oneOf` any more."""
    steps = pointer_steps(reference)
    if steps is None:
        return reference
    target: Any = root
    for i, step in enumerate(steps):
        if step == "oneOf" and not (isinstance(target, dict) and "oneOf" in target):
            steps[i] = "anyOf"
        target = child(target, steps[i])
    return "/".join(("#", *steps))


# --- keywords without an effect


def _remove_ineffective(found: dict[str, Any], references: References) -> None:
    """Remove the keywords that allow everything."""
    for keyword in [*found]:
        if _is_ineffective(keyword, found, references):
            del found[keyword]
    if "contains" not in found:
        found.pop("minContains", None)
        found.pop("maxContains", None)
    if "not" in found and _allows_all(found["not"]):  # zod writes such schemas for optional properties
        found.clear()
        found["enum"] = []


def _is_ineffective(keyword: str, found: Mapping[str, Any], references: References) -> bool:
    value = found[keyword]
    if keyword in _TYPES and "type" in found and _TYPES[keyword] not in as_list(found["type"]):
        return True
    if keyword == "uniqueItems":
        most = found.get("maxItems")
        return value is False or (isinstance(most, int) and most < 2)
    if keyword == "propertyNames":
        return _allows_all_names(references.resolved(value))
    if keyword in ("unevaluatedItems", "unevaluatedProperties"):
        return _allows_all(value)
    if keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        return isinstance(value, dict) and all(each in _EMPTY for each in value.values())
    if keyword in ("then", "else"):
        return "if" not in found or _allows_all(value)
    if keyword == "additionalItems":
        return not isinstance(found.get("items"), list)
    if keyword == "maxProperties":
        return _is_harmless_limit(value, found)
    return keyword == "not" and value is False


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS)


def _allows_all_names(schema: Any) -> bool:
    if isinstance(schema, dict) and "string" in as_list(schema.get("type")):
        schema = {keyword: value for keyword, value in schema.items() if keyword != "type"}
    return _allows_all(schema)


def _is_harmless_limit(most: Any, found: Mapping[str, Any]) -> bool:
    """Return True if an object declares at most `most` properties ("maxProperties") and allows no others."""
    declared = found.get("properties", {})
    others = found.get("additionalProperties") is not False or found.get("patternProperties")
    return isinstance(declared, dict) and isinstance(most, int) and not others and len(declared) <= most


# --- numbers


def _replace_numbers(found: dict[str, Any]) -> None:
    """Write counts as integers, and replace bounds of numbers that llguidance cannot represent."""
    if found.keys().isdisjoint(_NUMBERS):
        return
    for keyword in _COUNTS:
        value = found.get(keyword)
        if isinstance(value, float) and value.is_integer():
            found[keyword] = int(value)
    for keyword in ("minimum", "exclusiveMinimum"):
        if _is_number(found.get(keyword)) and found[keyword] < -_LARGEST:
            found[keyword] = -_LARGEST
    for keyword in ("maximum", "exclusiveMaximum"):
        if _is_number(found.get(keyword)) and found[keyword] > _LARGEST and found.get("type") != "integer":
            found[keyword] = _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- names of properties

_APPLICATORS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"})


def _close(found: dict[str, Any], references: References, limit: WorkLimit) -> None:
    """Replace "unevaluatedItems" and "unevaluatedProperties", unless what is evaluated depends on the value."""
    if found.get("unevaluatedItems") is False and not found.keys() & {*_APPLICATORS, "contains"}:
        del found["unevaluatedItems"]
        found.setdefault("additionalItems" if isinstance(found.get("items"), list) else "items", False)
    if found.get("unevaluatedProperties") is False and declare_all(found, references, limit):
        del found["unevaluatedProperties"]


def _list_names(found: dict[str, Any], references: References, limit: WorkLimit) -> None:
    """Replace "propertyNames" by declared properties, or by the pattern of a map."""
    if "propertyNames" not in found:
        return
    names = references.resolved(found["propertyNames"])
    if not isinstance(names, dict):
        return
    names = {keyword: value for keyword, value in names.items() if keyword not in ANNOTATIONS}
    replace_format(names)
    if "string" not in as_list(names.pop("type", "string")):
        return
    listed = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(listed, list) and len(names) == 1:
        limit.spend(len(listed))
        _declare(found, dict.fromkeys(each for each in listed if isinstance(each, str)))
    elif (pattern := _pattern_of(names)) and not found.keys() & {"properties", "patternProperties"}:
        _replace_entry(found, "propertyNames", "patternProperties", {pattern: found.get("additionalProperties", True)})
        found["additionalProperties"] = False


_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """Return the pattern of the texts that a schema allows, or None if it is unknown."""
    if names.keys() == {"pattern"}:
        return str(names["pattern"])
    if names == {"format": "uuid"}:
        return _UUID
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    counts = isinstance(least, int) and (most == "" or isinstance(most, int))
    return (
        rf"^[\s\S]{{{least},{most}}}$" if counts and names and not names.keys() - {"minLength", "maxLength"} else None
    )


def _declare(found: dict[str, Any], names: Collection[str]) -> None:
    """Allow exactly the given names of properties."""
    declared = found.get("properties", {})
    if "patternProperties" in found or not isinstance(declared, dict):
        return
    others = found.get("additionalProperties", True)
    properties = {name: schema if name in names else False for name, schema in declared.items()}
    properties.update((name, others) for name in names if name not in declared)
    found["properties"] = properties
    found["additionalProperties"] = False
    del found["propertyNames"]


_MOST_NAMES: Final = 300


def _list_patterns(found: dict[str, Any], limit: WorkLimit) -> None:
    """Declare the properties that match patterns of few names, such as ^(asc|desc)$.

    If all names of a pattern are declared, llguidance 1.9.1 still allows a comma and then waits for another name.
    """
    patterns = found.get("patternProperties")
    declared = found.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(declared, dict):
        return
    names: dict[str, list[str]] = {}
    for pattern in patterns:
        listed = listed_texts(pattern)
        if listed is not None and sum(map(len, names.values())) + len(listed) <= _MOST_NAMES:
            names[pattern] = listed
    if not names:
        return
    properties = dict(declared)
    limit.spend(sum(map(len, names.values())))
    for pattern, listed in names.items():
        for name in listed:
            known = properties.get(name, True)
            properties[name] = patterns[pattern] if known is True else {"allOf": [known, patterns[pattern]]}
    rest = {pattern: schema for pattern, schema in patterns.items() if pattern not in names}
    if "properties" not in found:
        _replace_entry(found, "patternProperties", "properties", properties)
    found["properties"] = properties
    found.pop("patternProperties", None)
    if rest:
        found["patternProperties"] = rest
