"""Random tools, with schemas of every kind that formats without JSON support too."""

from __future__ import annotations

from random import Random
from typing import Any

_WORDS = ("place", "count", "unit", "days", "query", "path", "limit", "mode", "when", "tags")


def random_tools(random: Random) -> list[dict[str, Any]]:
    """Return one to three tools in OpenAI's form."""
    names = random.sample(("get_weather", "search-web", "now", "Run_2", "math.add"), random.randint(1, 3))
    return [{"type": "function", "function": {"name": name, "parameters": _object(random, 0)}} for name in names]


def keys_of(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of all arguments of tools, also of those inside objects."""
    found: set[str] = set()

    def visit(schema: Any) -> None:
        if isinstance(schema, dict):
            found.update(schema.get("properties", {}))
            for value in schema.values():
                visit(value)
        elif isinstance(schema, list):
            for value in schema:
                visit(value)

    visit([tool["function"]["parameters"] for tool in tools])
    return sorted(found | {"item"})


def _object(random: Random, depth: int) -> dict[str, Any]:
    keys = random.sample(_WORDS, random.randint(0 if depth == 0 else 1, 4 - min(depth, 2)))
    required = [key for key in keys if random.random() < 0.5]
    schema: dict[str, Any] = {"type": "object", "properties": {key: _value(random, depth + 1) for key in keys}}
    if required or random.random() < 0.5:
        schema["required"] = required
    if depth or random.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _value(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _string, _enum, _integer, _number, _boolean, _optional]
    if depth < 3:
        kinds += [_array, _object_value, _either]
    return random.choice(kinds)(random, depth)


def _string(random: Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "description": "A text"}
    if random.random() < 0.3:
        schema["minLength"] = random.randint(0, 3)
        schema["maxLength"] = random.randint(3, 12)
    return schema


def _enum(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "enum": random.sample(["c", "f", "it's", "two words", "ä<b>", 'say "x"'], 3)}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": -5, "maximum": random.randint(-5, 100)}


def _number(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "number"}


def _boolean(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _optional(random: Random, depth: int) -> dict[str, Any]:
    return {"type": [random.choice(("string", "integer", "boolean")), "null"]}


def _array(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _value(random, depth + 1), "minItems": random.randint(0, 2), "maxItems": 4}


def _object_value(random: Random, depth: int) -> dict[str, Any]:
    return _object(random, depth)


def _either(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_string(random, depth), _integer(random, depth)]}
