"""Closes the objects of JSON Schemas: only declared properties are allowed, as in OpenAI's strict mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from llmrun.engine.constraint.keywords import References, WorkLimit, as_list, subschemas

_ALTERNATIVES: Final = (("anyOf",), ("oneOf",), ("if", "then", "else"))  # not all schemas of a group need to match
_OPEN: Final = frozenset(  # keywords that allow other properties, or whose properties depend on the value
    (
        *("$dynamicRef", "additionalProperties", "dependentSchemas", "patternProperties", "unevaluatedProperties"),
        *chain(*_ALTERNATIVES),
    )
)
_MOST_STEPS: Final = 100_000  # schemas that are composed, and names that are declared, in 0.2 s
_MOST_PARTS: Final = 100


def closed(schema: Any) -> Any:
    """Return a copy of a schema whose objects allow only declared properties.

    Objects without declared properties stay as they are, and so do objects that say what else they allow. Of several
    schemas that describe one object together, the outermost is closed, unless the properties depend on the value.
    Raises ValueError if too many schemas are composed.
    """
    root = _copied(schema)
    references, limit = References(root), WorkLimit(_MOST_STEPS)
    composition = _Composition(references, limit)
    objects = [(found, composition.parts(found)) for _, found in subschemas(root)]
    inner = {id(part) for found, parts in objects for part in parts if part is not found}
    for found, parts in objects:
        if id(found) in inner or found.keys() & {"additionalProperties", "unevaluatedProperties"}:
            continue
        if parts:
            declare_all(found, references, limit)
        elif isinstance(found.get("properties"), dict):
            found["additionalProperties"] = False
    return root


def _copied(value: Any) -> Any:
    """Copy a JSON value. Unlike copy.deepcopy, this function never returns one object at two places."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def openai_json_schema(schema: Any) -> dict[str, Any]:
    """Return the value of `json_schema` in a `response_format` of OpenAI's API.

    `strict` is true only if all objects are closed. Otherwise, a server would close the objects or refuse the schema.
    """
    try:
        is_closed = closed(schema) == schema
    except ValueError:  # too large
        is_closed = False
    return {"name": "answer", "schema": schema, "strict": is_closed}


def declare_all(found: dict[str, Any], references: References, limit: WorkLimit) -> bool:
    """Allow only the properties that a schema and the parts of its `allOf` and `$ref` declare.

    Returns False, and changes nothing, if a part allows other properties or if its properties depend on the value.
    Raises ValueError if the parts exceed the limit.
    """
    names: dict[str, None] = {}
    waiting: list[Any] = [{keyword: value for keyword, value in found.items() if keyword != "unevaluatedProperties"}]
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.pop(0)
        if not isinstance(part, dict) or part.keys() & _OPEN:
            return False
        properties, parts = part.get("properties", {}), part.get("allOf", [])
        if not isinstance(properties, dict) or not isinstance(parts, list):
            return False
        limit.spend(len(properties) + len(parts))
        names.update(dict.fromkeys(properties))
        waiting += parts
        if "$ref" in part:
            waiting.append(references.resolved({"$ref": part["$ref"]}))
    if waiting:
        return False
    found["properties"] = {**dict.fromkeys(names, True), **found.get("properties", {})}
    found["additionalProperties"] = False
    return True


class _Composition:
    """Finds the schemas that describe one object together."""

    def __init__(self, references: References, limit: WorkLimit) -> None:
        self._references, self._limit = references, limit

    def parts(self, found: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the parts of a schema if more than one of them declares properties of the same object."""
        groups = [[option for key in keys for option in as_list(found.get(key, []))] for keys in _ALTERNATIVES]
        groups += [[part] for part in as_list(found.get("allOf", []))]
        groups.append(self._target(found))
        declaring = sum(any("properties" in part for part in self._applied(group)) for group in groups)
        return self._applied([found]) if declaring + ("properties" in found) > 1 else []

    def _applied(self, schemas: list[Any]) -> list[dict[str, Any]]:
        """Return the given schemas and the schemas inside them that apply to the same value, also by reference."""
        found: dict[int, dict[str, Any]] = {}
        waiting = [*schemas]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in found:
                continue
            self._limit.spend(1)
            found[id(part)] = part
            waiting += [each for key in ("allOf", *chain(*_ALTERNATIVES)) for each in as_list(part.get(key, []))]
            waiting += self._target(part)
        return [*found.values()]

    def _target(self, found: dict[str, Any]) -> list[Any]:
        return [self._references.resolved({"$ref": found["$ref"]})] if isinstance(found.get("$ref"), str) else []
