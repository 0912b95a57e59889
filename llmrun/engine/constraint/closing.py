"""Closes the objects of JSON Schemas: only declared properties are allowed, as in OpenAI's strict mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.keywords import resolved, subschemas

_ALTERNATIVES: Final = (("anyOf",), ("oneOf",), ("if", "then", "else"))  # not all schemas of a group need to match
_OPEN: Final = frozenset(  # keywords that allow other properties, or whose properties depend on the value
    (
        *("$dynamicRef", "additionalProperties", "dependentSchemas", "patternProperties", "unevaluatedProperties"),
        *chain(*_ALTERNATIVES),
    )
)
_MOST_STEPS: Final = 50_000
_MOST_PARTS: Final = 100


def closed(schema: Any) -> Any:
    """Return a copy of a schema whose objects allow only declared properties.

    Schemas that declare no properties are not changed, and neither are schemas with "additionalProperties" or
    "unevaluatedProperties". If several schemas describe one object together, as in "allOf", only the outermost schema
    is closed, unless the properties depend on the value. Raises UsageError if too many schemas are composed.
    """
    root = _copied(schema)
    composition = _Composition(root)
    objects = [(found, composition.parts(found)) for _, found in subschemas(root)]
    inner = {id(part) for found, parts in objects for part in parts if part is not found}
    for found, parts in objects:
        if id(found) in inner or found.keys() & {"additionalProperties", "unevaluatedProperties"}:
            continue
        if parts:
            declare_all(found, root)
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
    return {"name": "answer", "schema": schema, "strict": closed(schema) == schema}


def declare_all(found: dict[str, Any], root: Mapping[str, Any]) -> bool:
    """Close a schema, in place: allow only the properties that the schema, its `allOf` and its `$ref` declare.

    Returns False, and changes nothing, if a part allows other properties or if its properties depend on the value.
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
        names.update(dict.fromkeys(properties))
        waiting += parts
        if "$ref" in part:
            waiting.append(resolved({"$ref": part["$ref"]}, root))
    if waiting:
        return False
    found["properties"] = {**dict.fromkeys(names, True), **found.get("properties", {})}
    found["additionalProperties"] = False
    return True


class _Composition:
    """Finds the schemas that describe one object together."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def parts(self, found: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the schemas that describe one object together, or [] unless several declare properties."""
        groups = [[option for key in keys for option in _listed(found, key)] for keys in _ALTERNATIVES]
        groups += [[part] for part in _listed(found, "allOf")]
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
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise UsageError(
                    "too many schemas are composed for strict mode", hint='set "additionalProperties" in the schema'
                )
            found[id(part)] = part
            waiting += [each for key in ("allOf", *chain(*_ALTERNATIVES)) for each in _listed(part, key)]
            waiting += self._target(part)
        return [*found.values()]

    def _target(self, found: dict[str, Any]) -> list[Any]:
        return [resolved({"$ref": found["$ref"]}, self._root)] if "$ref" in found else []


def _listed(found: dict[str, Any], keyword: str) -> list[Any]:
    value = found.get(keyword, [])
    return value if isinstance(value, list) else [value]
