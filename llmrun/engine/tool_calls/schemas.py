"""Reads the definitions of tools, and weakens their JSON schemas to what a grammar can enforce.

The schemas of tools come from third parties, often from a program. Tools whose schemas contain unsupported keywords are
not refused, because calls are checked against the whole schema before they run. A tool with `strict: true`, as in
OpenAI's API, keeps its whole schema, and is refused if the schema cannot be enforced.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from llmrun.base.errors import UsageError, shown
from llmrun.engine.constraint.keywords import resolved, subschemas
from llmrun.engine.requests import CUSTOM, INPUT, LONGEST_TOOL_NAME
from llmrun.engine.templates.tool_format import JSON_TYPES, json_type

# llguidance 1.9 refuses these keywords, or accepts them only in some combinations.
_UNSUPPORTED = frozenset(
    (
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$schema"),
        *("contains", "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *(
            "maxContains",
            "maxProperties",
            "minContains",
            "minProperties",
            "not",
            "propertyNames",
            "then",
            "unevaluatedItems",
        ),
        *("unevaluatedProperties", "uniqueItems", "x-guidance"),
    )
)
_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")


def weakened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without unsupported keywords that matches at least everything that the given schema matches.

    Raises RecursionError if the schema is nested too deeply.
    """
    found = copy.deepcopy(dict(schema))
    for _, each in subschemas(found):
        for keyword, value in [*each.items()]:
            if _is_unsupported(keyword, value):
                del each[keyword]
        if "oneOf" in each and "anyOf" in each:
            each["allOf"] = [*each.get("allOf", []), {"anyOf": each.pop("oneOf")}]
        elif "oneOf" in each:
            each["anyOf"] = each.pop("oneOf")
    return found


def _is_unsupported(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return str(value) not in _FORMATS
    return keyword in _UNSUPPORTED or (keyword == "pattern" and bool(_LOOKS_AROUND.search(str(value))))


_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}")
_MOST_BRANCHES = 200  # maximum number of subschemas whose types are inspected; all other subschemas may have any type


class Tool(Struct, frozen=True):
    """A tool that the model may call.

    parameters  the part of the arguments' JSON schema that a grammar enforces; {} if the tool declares no arguments
    strict      True if the tool is refused when its whole schema cannot be enforced, as in OpenAI's API
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def properties(self) -> dict[str, Any]:
        """Return the schema of each argument."""
        schema = resolved(self.parameters, self.parameters)
        found = schema.get("properties") if isinstance(schema, Mapping) else None
        return dict(found) if isinstance(found, Mapping) else {}


def read_tools(definitions: Sequence[Any]) -> list[Tool]:
    """Read definitions in OpenAI's form: {"type": "function", "function": {"name", "parameters", ...}}.

    Custom tools are strict. Raises UsageError, which names the tool, for definitions in another form, invalid names,
    duplicates, and custom tools with a grammar that cannot be enforced.
    """
    from llmrun.engine.constraint.closing import closed  # most runs have no tools

    tools: dict[str, Tool] = {}
    for number, definition in enumerate(definitions, 1):
        function = definition.get("function") if isinstance(definition, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(
                f"invalid tool: number {number} has no function with a name",
                hint='define it as {"type": "function", "function": {"name": ..., "parameters": ...}}',
            )
        name = function["name"]
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"invalid tool name: {shown(name, 80)!r}",
                hint=f"use 1 to {LONGEST_TOOL_NAME} letters, digits, underscores, hyphens and dots",
            )
        if name in tools:
            raise UsageError(f"two tools have the same name: {name}", hint="give each tool its own name")
        if CUSTOM in definition:
            tools[name] = Tool(name, input_parameters(_input_schema(name, definition[CUSTOM])), strict=True)
            continue
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise UsageError(f"invalid parameters of the tool {name}: not a JSON schema of an object")
        try:
            strict = function.get("strict") is True
            enforced = parameters and (closed(parameters) if strict else weakened(parameters))
        except RecursionError:
            raise UsageError(f"invalid parameters of the tool {name}: nested too deeply") from None
        except ValueError as error:
            raise UsageError(f"invalid parameters of the tool {name}: {error}") from None
        tools[name] = Tool(name, enforced or {}, strict)
    return list(tools.values())


def input_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a custom tool whose input has the given schema."""
    return {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}


def _input_schema(name: str, grammar: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the schema of a custom tool's input. Raises UsageError if the grammar cannot be enforced."""
    if not grammar:
        return {"type": "string"}
    pattern = grammar["definition"]
    if grammar["syntax"] == "lark":
        from llmrun.engine.tool_calls.lark_regex import lark_regex  # few tools have a grammar

        try:
            pattern = lark_regex(pattern)
        except ValueError as error:
            raise UsageError(f"tools: the grammar of {name} cannot be enforced: {error}") from None
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows. A number may be an integer, so "number" implies "integer"."""
    return _types(schema, root, {})


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]]) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or len(known) > _MOST_BRANCHES:
        return frozenset(JSON_TYPES)
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = frozenset(JSON_TYPES)  # the initial value, for schemas that refer to themselves
    found = frozenset(_own_types(schema))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(_types(each, root, known) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            found &= _types(each, root, known)
    known[id(schema)] = found
    return found


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    if "const" in schema:
        yield json_type(schema["const"])
    elif isinstance(schema.get("enum"), list):
        yield from map(json_type, schema["enum"])
    else:
        given = schema.get("type", list(JSON_TYPES))
        given = [given] if isinstance(given, str) else given if isinstance(given, list) else list(JSON_TYPES)
        for kind in given:
            yield str(kind)
            if kind == "number":
                yield "integer"
