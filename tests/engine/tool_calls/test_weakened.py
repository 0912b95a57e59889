"""Tests that weakened schemas compile, and match at least what the original ones match."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import ConstraintCompiler
from llmrun.engine.tool_calls.schemas import weakened

pytestmark = pytest.mark.push

ARRAY = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "phone"}, {"type": "string"}),
        ({"type": "string", "format": "uuid"}, {"type": "string", "format": "uuid"}),
        ({"type": "string", "pattern": "^(?!a).*$"}, {"type": "string"}),
        ({**ARRAY, "uniqueItems": True}, ARRAY),
        ({"properties": {"not": {"not": {}}}}, {"properties": {"not": {}}}),
        ({"oneOf": [{"not": {}}, {}]}, {"anyOf": [{}, {}]}),
        ({"anyOf": [{}], "oneOf": [{}]}, {"anyOf": [{}], "allOf": [{"anyOf": [{}]}]}),
        ({"enum": [{"not": 1}], "default": {"if": 1}}, {"enum": [{"not": 1}], "default": {"if": 1}}),
        ({"items": {"if": {}, "type": "null"}}, {"items": {"type": "null"}}),
    ],
)
def test_unsupported_keywords_are_left_out(schema: Any, expected: Any) -> None:
    assert weakened(schema) == expected
    if isinstance(schema, dict):
        wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(weakened(schema)))
        compiler = ConstraintCompiler()
        compiler.compile(wanted, ScriptedTokenizer())
        compiler.close()
