"""Weakens the schemas of tools to what a grammar can enforce.

The schemas of tools come from third parties, often from a program, and a keyword that the grammar cannot enforce is no
reason to refuse a tool: calls are checked against the whole schema before they run. A tool with `strict: true`, as in
OpenAI's API, keeps its schema, so that it is refused instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# llguidance 1.9 refuses these keywords, or accepts them only in some combinations.
_UNSUPPORTED = frozenset(
    (
        *(
            "$anchor",
            "$dynamicAnchor",
            "$dynamicRef",
            "$id",
            "$recursiveAnchor",
            "$recursiveRef",
            "$schema",
            "contains",
        ),
        *("contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains"),
        *("maxProperties", "minContains", "minProperties", "not", "propertyNames", "then", "unevaluatedItems"),
        *("unevaluatedProperties", "uniqueItems", "x-guidance"),
    )
)
_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")  # keywords whose value maps names to schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "items")


def weakened(schema: Any) -> Any:
    """Return a schema that matches at least what the given one matches, without unsupported keywords.

    Raises RecursionError if the schema is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _UNSUPPORTED or (keyword == "format" and str(value) not in _FORMATS):
            continue
        if keyword == "pattern" and _LOOKS_AROUND.search(str(value)):
            continue
        if keyword in _MAPS and isinstance(value, Mapping):
            value = {name: weakened(part) for name, part in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            value = [weakened(part) for part in value]
        elif keyword in _SCHEMAS:
            value = weakened(value)
        found["anyOf" if keyword == "oneOf" and "anyOf" not in schema else keyword] = value
    if "oneOf" in schema and "anyOf" in schema:
        found["allOf"] = [*found.get("allOf", []), {"anyOf": found.pop("oneOf")}]
    return found
