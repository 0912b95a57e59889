"""Tests of rewriting schemas for llguidance. test_generated_schemas.py compares answers with the original schemas."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.closing import closed, openai_json_schema
from llmrun.engine.constraint.exclusion import Exclusion
from llmrun.engine.constraint.matcher import schema_of
from llmrun.engine.constraint.rewriting import enforceable

A = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}
UNTYPED_A, UNTYPED_B = ({key: value for key, value in each.items() if key != "type"} for each in (A, B))
P = {"type": "object", "properties": {"p": {}}}
Q = {"type": "object", "properties": {"q": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"uniqueItems": False, "minItems": 1.0, "maxItems": 2e0}, {"minItems": 1, "maxItems": 2}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"type": "string", "uniqueItems": True, "minProperties": 3}, {"type": "string"}),
        ({"type": ["array", "null"], "uniqueItems": True}, {"type": ["array", "null"], "uniqueItems": True}),
        ({"propertyNames": {}}, {}),
        ({"propertyNames": {"type": "string", "title": "Key"}}, {}),
        ({"propertyNames": {"pattern": "^a"}}, {"patternProperties": {"^a": True}, "additionalProperties": False}),
        (
            {"propertyNames": {"minLength": 1}},
            {"patternProperties": {r"^[\s\S]{1,}$": True}, "additionalProperties": False},
        ),
        (
            {
                "properties": {"b": {}, "c": {}},
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "null"},
            },
            {"properties": {"b": {}, "c": False, "a": {"type": "null"}}, "additionalProperties": False},
        ),
        ({"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, None),
        ({"propertyNames": {"not": {"const": "a"}}}, None),
        ({"patternProperties": {"^(a|b)$": {}}}, {"properties": {"a": {}, "b": {}}}),
        (
            {"patternProperties": {"^a$": {"minimum": 1}, "^b": {}}, "properties": {"a": {"type": "integer"}}},
            {"properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 1}]}}, "patternProperties": {"^b": {}}},
        ),
        ({"dependentRequired": {"a": []}, "dependencies": {}, "dependentSchemas": {"a": True}}, {}),
        ({"dependentRequired": {"a": ["b"]}}, None),
        ({"not": False, "contentSchema": {}}, {"contentSchema": {}}),
        ({"anyOf": [{"not": {}}, {}]}, {"anyOf": [{"enum": []}, {}]}),
        ({"then": {}, "else": {"type": "null"}, "maxContains": 3}, {}),
        ({"if": {}, "then": {"type": "null"}}, None),
        (
            {"properties": {"a": {}}, "additionalProperties": False, "maxProperties": 1},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"properties": {"a": {}}, "maxProperties": 1}, None),
        ({"prefixItems": [{}], "additionalItems": False}, {"prefixItems": [{}]}),
        ({"items": [{}], "additionalItems": False}, {"prefixItems": [{}], "items": False}),
        ({"prefixItems": [{}], "unevaluatedItems": False}, {"prefixItems": [{}], "items": False}),
        (
            {"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False},
            {"exclusiveMinimum": 1, "maximum": 3},
        ),
        (
            {"type": "integer", "minimum": -(1 << 63), "maximum": 1 << 63},
            {"type": "integer", "minimum": 1024 - (1 << 63), "maximum": 1 << 63},
        ),
        ({"maximum": 1e300}, {"maximum": (1 << 63) - 1024}),
        ({"format": "int32"}, {}),
        ({"format": "iri"}, None),
        (
            {"$schema": "https://json-schema.org/draft-07/schema"},
            {"$schema": "http://json-schema.org/draft-07/schema#"},
        ),
        ({"$schema": "https://example.com/dialect", "x": 1}, {"x": 1}),
        ({"oneOf": [A, B]}, {"anyOf": [A, B]}),
        ({"oneOf": [A, B], "anyOf": [A]}, None),
        (
            {
                "properties": {
                    "x": {"oneOf": [A, B]},
                    "y": {"$ref": "#/properties/x/oneOf/1"},
                    "oneOf": {},
                    "z": {"$ref": "#/properties/oneOf"},
                }
            },
            {
                "properties": {
                    "x": {"anyOf": [A, B]},
                    "y": {"$ref": "#/properties/x/anyOf/1"},
                    "oneOf": {},
                    "z": {"$ref": "#/properties/oneOf"},
                }
            },
        ),
    ],
)
def test_schemas_are_rewritten(schema: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """An expected schema of None means that the schema is not changed."""
    before = str(schema)
    assert enforceable(schema) == (schema if expected is None else expected)
    assert str(schema) == before


NAMES = [f"n{i}" for i in range(2000)]
MANY = {"$defs": {"N": {"enum": NAMES}, "P": {"properties": dict.fromkeys(NAMES, True)}}}


@pytest.mark.parametrize(
    "part",
    [
        {"propertyNames": {"$ref": "#/$defs/N"}},
        {"allOf": [{"$ref": "#/$defs/P"}], "unevaluatedProperties": False},
        {"patternProperties": {"^[a-j][0-9]$": True}},
    ],
)
def test_schemas_do_not_grow_without_limit(part: Any) -> None:
    assert enforceable({**MANY, "items": part})
    with pytest.raises(ValueError, match="too many schemas"):
        enforceable({**MANY, "anyOf": [part] * 1100})


def test_closed_schemas_do_not_grow_without_limit() -> None:
    part = {"properties": {"a": True}, "allOf": [{"$ref": "#/$defs/P"}]}
    schema = {**MANY, "properties": dict.fromkeys(NAMES, part)}
    with pytest.raises(ValueError, match="too many schemas"):
        closed(schema)
    assert not openai_json_schema(schema)["strict"]
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema), strict=True)
    with pytest.raises(UsageError, match="response_format: too many schemas"):
        schema_of(wanted)


def test_the_objects_of_strict_formats_are_closed() -> None:
    for text in (json.dumps(P), json.dumps({"items": P})):
        assert schema_of(ResponseFormat(FormatKind.JSON_SCHEMA, text)) == json.loads(text)
        assert schema_of(ResponseFormat(FormatKind.JSON_SCHEMA, text, strict=True)) == closed(json.loads(text))


@pytest.mark.parametrize("reference", ["#/a/oneOf/0", "#/oneOf/" + "9" * 5000, "#" + "/oneOf" * 5000, "#/oneOf/²", 5])
def test_references_may_lead_nowhere(reference: object) -> None:
    schema = {"a": True, "properties": {"b": {"$ref": reference}, "c": {}}, "oneOf": [A, B], "allOf": [P]}
    assert enforceable(schema)["anyOf"] == [A, B]
    assert closed(schema)["properties"]["b"] == {"$ref": reference}


def test_the_order_of_keywords_remains() -> None:
    """llguidance derives the order of properties from the order of keywords."""
    schema = {"oneOf": [A, B], "patternProperties": {"^a$": {}}, "required": ["a"]}
    assert [*enforceable(schema)] == ["anyOf", "properties", "required"]


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (A, B, True),
        (A, A, False),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer"}, {"type": ["string", "null"]}, True),
        ({"enum": [1, 2]}, {"const": 2.0}, False),
        ({"enum": [1, 2]}, {"const": True}, True),
        ({"enum": [[1]]}, {"const": [2]}, False),  # the options are disjoint, but a proof is not worth its code
        ({"allOf": [{"$ref": "#/$defs/A"}]}, {"$ref": "#/$defs/B", "title": "B"}, True),
        ({"$ref": "#/$defs/A"}, {"$ref": "#/$defs/missing"}, False),
        ({"anyOf": [A, {"type": "null"}]}, B, True),
        ({"anyOf": [A, {"type": "null"}]}, {"oneOf": [B, {"type": "null"}]}, False),
        (
            {"type": "object", "required": ["a"]},
            {"type": "object", "properties": {}, "additionalProperties": False},
            True,
        ),
        (
            {"type": "object", "required": ["a"]},
            {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False},
            False,
        ),
        ({**A, "required": []}, {**B, "required": []}, False),
        (UNTYPED_A, B, True),
        (UNTYPED_A, UNTYPED_B, False),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, True),
        ({"maximum": 2}, {"minimum": 3}, False),
        ({"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 2}, False),
        (False, {}, True),
        ({"type": 3, "enum": {}, "required": 1, "properties": [], "allOf": {}}, {"anyOf": 1, "$ref": []}, False),
    ],
)
def test_options_are_compared(first: Any, second: Any, apart: bool) -> None:
    for options in ([first, second], [second, first]):
        root = {"oneOf": options, "$defs": {"A": A, "B": B}}
        assert Exclusion(root, [root]).is_exclusive(root) is apart


@pytest.mark.parametrize(
    "part", [{"type": "object", "required": [f"n{i}" for i in range(5000)]}, {"enum": [{"a": 1}] * 5000}]
)
def test_large_options_are_not_compared_for_long(part: dict[str, Any]) -> None:
    """Before there was a limit, these options took up to 30 s."""
    options = [
        {"allOf": [{"$ref": "#/$defs/part"}] * 15, "properties": {"k": {"const": i}}, "required": ["k"]}
        for i in range(40)
    ]
    began = process_time()
    enforceable({"oneOf": options, "$defs": {"part": part}})
    assert process_time() - began < 3


def test_references_are_not_followed_across_identifiers() -> None:
    root: dict[str, Any] = {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": {"$id": "x", **A}}}
    assert not Exclusion(root, [root, root["$defs"]["A"]]).is_exclusive(root)


def test_keywords_beside_a_reference_do_not_count_in_draft_7() -> None:
    root = {"oneOf": [{"$ref": "#/$defs/A", "type": "null"}, A], "$defs": {"A": A}}
    assert Exclusion(root, [root]).is_exclusive(root)
    root["$schema"] = "http://json-schema.org/draft-07/schema#"
    assert not Exclusion(root, [root]).is_exclusive(root)


CLOSED_P = {**P, "additionalProperties": False}
CLOSED_Q = {**Q, "additionalProperties": False}
BOTH = {"properties": {"p": True, "q": True}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (P, CLOSED_P),
        ({"type": "array", "items": P}, {"type": "array", "items": CLOSED_P}),
        ({"anyOf": [P, Q]}, {"anyOf": [CLOSED_P, CLOSED_Q]}),
        ({"$ref": "#/$defs/P", "$defs": {"P": P}}, {"$ref": "#/$defs/P", "$defs": {"P": CLOSED_P}}),
        ({"allOf": [P, Q]}, {"allOf": [P, Q], **BOTH}),
        ({"anyOf": [{"allOf": [P, Q]}, P]}, {"anyOf": [{"allOf": [P, Q], **BOTH}, CLOSED_P]}),
        ({**P, "anyOf": [{"required": ["p"]}]}, {**CLOSED_P, "anyOf": [{"required": ["p"]}]}),
        ({**P, "anyOf": [Q]}, {**P, "anyOf": [Q]}),  # which properties are declared depends on the object
        ({**P, "additionalProperties": True}, {**P, "additionalProperties": True}),
        ({**P, "unevaluatedProperties": {}}, {**P, "unevaluatedProperties": {}}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "string"}, {"type": "string"}),
        (True, True),
    ],
)
def test_objects_are_closed(schema: Any, expected: Any) -> None:
    before = str(schema)
    assert closed(schema) == expected
    assert str(schema) == before
    assert openai_json_schema(schema)["strict"] is (schema == expected)
    assert closed(expected) == expected
