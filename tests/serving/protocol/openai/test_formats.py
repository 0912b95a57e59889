"""Tests of the formats that answers must have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import check_format, schema_of
from tests.support.protocol.answers import TOOL, chat, completion
from tests.support.protocol.refusals import refused

SCHEMA = {"type": "object", "properties": {"ä": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
OPENAI = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
STRICT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


def schema(origin: str, text: str = TEXT, *, strict: bool = False) -> ResponseFormat:
    return ResponseFormat(FormatKind.JSON_SCHEMA, text, origin=origin, strict=strict)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"grammar": "", "guided_regex": ""}, None),
        ({"response_format": {"type": "json_object"}}, ResponseFormat(FormatKind.JSON_OBJECT)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, schema("response_format.schema")),
        ({"response_format": OPENAI}, schema("response_format.json_schema.schema")),
        ({"response_format": STRICT}, schema("response_format.json_schema.schema", strict=True)),
        ({"json_schema": SCHEMA}, schema("json_schema")),
        ({"guided_json": SCHEMA}, schema("guided_json")),
        ({"guided_json": TEXT}, schema("guided_json")),
        ({"structured_outputs": {"json": SCHEMA}}, schema("structured_outputs.json")),
        (
            {"structured_outputs": {"json_object": True}},
            ResponseFormat(FormatKind.JSON_OBJECT, origin="structured_outputs.json_object"),
        ),
        ({"grammar": 'root ::= "a"'}, ResponseFormat(FormatKind.GRAMMAR, 'root ::= "a"', origin="grammar")),
        ({"guided_grammar": "start: /a/"}, ResponseFormat(FormatKind.GRAMMAR, "start: /a/", origin="guided_grammar")),
        ({"guided_regex": "a+"}, ResponseFormat(FormatKind.REGEX, "a+", origin="guided_regex")),
        (
            {"structured_outputs": {"regex": "a+"}},
            ResponseFormat(FormatKind.REGEX, "a+", origin="structured_outputs.regex"),
        ),
        (
            {"guided_choice": ["yes", "no"]},
            ResponseFormat(FormatKind.CHOICE, choices=("yes", "no"), origin="guided_choice"),
        ),
    ],
)
def test_every_notation_is_understood(fields: dict[str, Any], wanted: ResponseFormat | None) -> None:
    for parse in (chat, completion):
        parsed = parse(**fields)
        assert parsed.requests[0].response_format == wanted
        assert parsed.ignored == ()
    if wanted is not None:
        check_format(wanted)
        assert (schema_of(wanted) is not None) == wanted.kind.value.startswith("json")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [], "name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"grammar": 5}, "grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"structured_outputs": {"regex": []}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "grammar": "b"}, "guided_regex"),
        ({"response_format": OPENAI, "json_schema": {}}, "json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_invalid_formats_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(chat, param, **fields)


def test_formats_and_tools_exclude_each_other() -> None:
    refused(chat, "guided_regex", "unsupported_parameter", guided_regex="a", tools=[TOOL])
    assert chat(guided_regex="a", tools=[TOOL], tool_choice="none").requests[0].response_format is not None
