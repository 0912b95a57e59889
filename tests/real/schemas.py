"""12 texts whose facts the model puts into JSON. Each answer must match its schema and contain the facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jsonschema

from tests.real.answers import Choice, text_of
from tests.real.groups import Task

_TOKENS = 400
Path = tuple[str | int, ...]


def tasks() -> list[Task]:
    return [_task(*row) for row in _TEXTS]


def _task(name: str, text: str, schema: dict[str, Any], facts: Mapping[Path, Any]) -> Task:
    question = f"Put the facts of this text into JSON.\n\n{text}"
    body = {
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "max_tokens": _TOKENS,
    }
    return Task(name, body, partial(_is_right, schema, facts))


def _is_right(schema: dict[str, Any], facts: Mapping[Path, Any], choice: Choice) -> bool:
    """Return whether an answer is complete, matches the schema, and has the expected value at each path."""
    try:
        answer = json.loads(text_of(choice))
        jsonschema.validate(answer, schema, jsonschema.Draft202012Validator)
        return all(_same(_at(answer, path), fact) for path, fact in facts.items())
    except (ValueError, KeyError, IndexError, jsonschema.ValidationError):
        return False


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _same(value: Any, fact: Any) -> bool:
    if isinstance(value, str) and isinstance(fact, str):
        return value.strip().casefold() == fact.casefold()
    return bool(value == fact)


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with only these properties. `required` names the required properties."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_DATE = {"type": "string", "format": "date"}


def _list(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


_TEXTS: list[tuple[str, str, dict[str, Any], Mapping[Path, Any]]] = [
    (
        "contact",
        "Call Maria Lopez of Acme Corp. at +1 555 0100, or write to maria@acme.example.",
        _closed("name company phone email", name=_STRING, company=_STRING, phone=_STRING, email=_STRING),
        {("name",): "Maria Lopez", ("email",): "maria@acme.example"},
    ),
    (
        "invoice",
        "Invoice 2041 of 2026-02-17: 3 keyboards at 45.50 each and 1 monitor at 199.00.",
        _closed(
            "number date lines",
            number=_INTEGER,
            date=_DATE,
            lines=_list(_closed("item quantity price", item=_STRING, quantity=_INTEGER, price=_NUMBER), minItems=1),
        ),
        {
            ("number",): 2041,
            ("date",): "2026-02-17",
            ("lines", 0, "quantity"): 3,
            ("lines", 0, "price"): 45.5,
            ("lines", 1, "price"): 199,
        },
    ),
    (
        "review",
        "The battery lasts all day and the screen is great, but the speakers are awful. Four stars out of five.",
        _closed(
            "stars sentiment pros cons",
            stars={"type": "integer", "minimum": 1, "maximum": 5},
            sentiment=_one_of("positive", "mixed", "negative"),
            pros=_list(_STRING, maxItems=4),
            cons=_list(_STRING, maxItems=4),
        ),
        {("stars",): 4},
    ),
    (
        "issue",
        "Since version 3.2, the app crashes when I open a file larger than 2 GB. This blocks our release! (Windows 11)",
        _closed(
            "kind severity version platform",
            kind=_one_of("bug", "feature", "question"),
            severity=_one_of("low", "medium", "high", "critical"),
            version={"type": "string", "pattern": r"^\d+(\.\d+)*$"},
            platform=_one_of("linux", "macos", "windows"),
        ),
        {("kind",): "bug", ("version",): "3.2", ("platform",): "windows"},
    ),
    (
        "optional values",
        "Peter is 41 years old. We do not know where he lives.",
        _closed(
            "name age city",
            name=_STRING,
            age={"anyOf": [_INTEGER, {"type": "null"}]},
            city={"anyOf": [_STRING, {"type": "null"}]},
        ),
        {("name",): "Peter", ("age",): 41, ("city",): None},
    ),
    (
        "definitions",
        "The Brown family lives at 12 Elm Street in Salem. Their office is at 7 Main Street in Boston.",
        {
            **_closed("home office", home={"$ref": "#/$defs/Address"}, office={"$ref": "#/$defs/Address"}),
            "$defs": {"Address": _closed("number street city", number=_INTEGER, street=_STRING, city=_STRING)},
        },
        {("home", "number"): 12, ("home", "city"): "Salem", ("office", "number"): 7, ("office", "city"): "Boston"},
    ),
    (
        "recursion",
        "The company is led by Ann. Bob and Carla work for Ann. Dan works for Carla.",
        {
            "$ref": "#/$defs/Person",
            "$defs": {"Person": _closed("name reports", name=_STRING, reports=_list({"$ref": "#/$defs/Person"}))},
        },
        {
            ("name",): "Ann",
            ("reports", 0, "name"): "Bob",
            ("reports", 1, "name"): "Carla",
            ("reports", 1, "reports", 0, "name"): "Dan",
        },
    ),
    (
        "alternatives",
        "Pay 30 euros by card number 4111 1111 1111 1111.",
        _closed(
            "amount method",
            amount=_NUMBER,
            method={
                "anyOf": [
                    _closed("type card_number", type={"const": "card"}, card_number=_STRING),
                    _closed("type iban", type={"const": "transfer"}, iban=_STRING),
                ]
            },
        ),
        {("amount",): 30, ("method", "type"): "card"},
    ),
    (
        "map",
        "Population in millions: Norway 5.5, Chile 19.6, Kenya 55.",
        {"type": "object", "additionalProperties": _NUMBER, "minProperties": 1, "maxProperties": 5},
        {("Norway",): 5.5, ("Chile",): 19.6, ("Kenya",): 55},
    ),
    (
        "list",
        "We visited Rome in May, Athens in June and Cairo in October.",
        _list(_closed("city month", city=_STRING, month={"type": "integer", "minimum": 1, "maximum": 12})),
        {(0, "city"): "Rome", (0, "month"): 5, (1, "month"): 6, (2, "city"): "Cairo", (2, "month"): 10},
    ),
    (
        "flags",
        "The house has a garden and a garage, but no pool. It has 140 square meters and 5 rooms.",
        _closed(
            "area rooms garden garage pool",
            area=_NUMBER,
            rooms=_INTEGER,
            garden=_BOOLEAN,
            garage=_BOOLEAN,
            pool=_BOOLEAN,
        ),
        {("area",): 140, ("rooms",): 5, ("garden",): True, ("garage",): True, ("pool",): False},
    ),
    (
        "open object",
        "Server web-3 runs Debian 12, has 8 cores, and belongs to the group frontend.",
        {
            "type": "object",
            "properties": {"host": _STRING, "os": _STRING, "cores": _INTEGER, "group": _STRING},
            "required": ["host", "cores", "group"],
        },
        {("host",): "web-3", ("cores",): 8, ("group",): "frontend"},
    ),
]
