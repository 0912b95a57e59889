"""The notation in which the schemas of the OpenAPI document are written."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.serving.protocol.schema_notation import read_schemas


@pytest.mark.parametrize(
    ("written", "schema"),
    [
        ("string", {"type": "string"}),
        ("string | null", {"type": ["string", "null"]}),
        ('"a" | null', {"enum": ["a", None]}),
        ("0", {"const": 0}),
        ("integer(-1..MOST)", {"type": "integer", "minimum": -1, "maximum": 7}),
        ("string(NAME)", {"type": "string", "pattern": "^[a-z]+$"}),
        ("string(1..)[](..2)", {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 2}),
        (
            "(string | Other)[]",
            {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/components/schemas/Other"}]}},
        ),
        ("KINDS", {"enum": ["a", "b"]}),
        ('true | "a" | number', {"anyOf": [{"enum": [True, "a"]}, {"type": "number"}]}),
        ("{[string]: number}", {"type": "object", "additionalProperties": {"type": "number"}}),
    ],
)
def test_types_become_schemas(written: str, schema: dict[str, Any]) -> None:
    names = {"MOST": 7, "NAME": "[a-z]+", "KINDS": ("a", "b")}
    assert read_schemas(f"One = {written}", names) == {"One": schema}


def test_comments_describe_what_is_before_them() -> None:
    text = """
    count = integer(0..) // A number.
    more = {b?: count}
    One = {
      a: string
        // Of a
        // in two lines.
      ...more
    } // Of the object.
    """
    a = {"type": "string", "description": "Of a in two lines."}
    b = {"type": "integer", "minimum": 0, "description": "A number."}
    properties = {"a": a, "b": b}
    assert read_schemas(text, {}) == {
        "One": {"type": "object", "required": ["a"], "properties": properties, "description": "Of the object."}
    }


@pytest.mark.parametrize("text", ["One string", "One = unknown", "One = {a string}"])
def test_mistakes_are_errors(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_schemas(text, {})
