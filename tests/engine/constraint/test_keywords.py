"""Tests of finding keywords in a schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.keywords import ignored, place_of, subschemas
from tests.support.constraint.matchers import accepts, byte_tokenizer, matcher, schema_grammar

SCHEMA = {
    "items": {"not": {"type": "null"}},
    "properties": {"not": {"anyOf": [True, {"format": "a"}, {"format": "b"}]}, "a/~b": {"if": {}}},
    "const": {"not": {"format": "a"}},
    "default": {"if": {}},
    "enum": [{"contains": {}}],
    "$defs": {"x": {"items": [{"then": {}}]}},
}


def test_every_subschema_has_its_place() -> None:
    assert [place for place, _ in subschemas(SCHEMA)] == [
        "",
        "/items",
        "/items/not",
        "/properties/not",
        "/properties/not/anyOf/1",
        "/properties/not/anyOf/2",
        "/properties/a~1~0b",
        "/properties/a~1~0b/if",
        "/$defs/x",
        "/$defs/x/items/0",
        "/$defs/x/items/0/then",
    ]


def test_names_and_values_are_no_keywords() -> None:
    assert place_of(SCHEMA, "not") == "/items/not"
    assert place_of(SCHEMA, "format", "b") == "/properties/not/anyOf/2/format"
    assert place_of(SCHEMA, "contains") is None
    assert place_of(True, "not") is None
    assert list(ignored(SCHEMA)) == []


def test_keywords_of_later_drafts_are_found() -> None:
    draft = "http://json-schema.org/draft-06/schema#"
    found = list(ignored({"$schema": draft, **SCHEMA}))
    assert [place for place, _ in found] == ["/properties/a~1~0b/if", "/$defs/x/items/0/then"]
    assert found[0][1] == '"if" has no effect in draft-06, which "$schema" declares'


def test_large_integers_are_found_in_values() -> None:
    inexact = {"properties": {"a": {"enum": [1, [{"b": 1 << 60}]]}}, "default": 1 << 60, "minimum": 1 << 60}
    assert [place for place, _ in ignored(inexact)] == ["/properties/a/enum"]
    assert list(ignored({"const": [True, 1 << 53, -(1 << 53)]})) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\0b"},
        {"enum": ["a", [{"k": "\x7f"}]]},
        {"pattern": "a\x1b"},
        {"pattern": r"a\x1B"},
        {"pattern": r"\\\x{1}"},
        {"pattern": r"[\u000b]"},
        {"pattern": r"[\n\[]\v"},
        {"patternProperties": {r"^\u{00}$": {}}},
    ],
)
def test_control_characters_are_found(schema: dict[str, object]) -> None:
    assert [place for place, _ in ignored(schema)] == [f"/{next(iter(schema))}"]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"\0": "\b\f\n\r\t\x80"}},
        {"pattern": r"^[^\x00-\x1f]$"},
        {"pattern": r"^[\x00-\x1f\x7f]\\x01\x0a\u{20}\n$"},
        {"pattern": r"\[[^\x01]\]"},
        {"pattern": 1, "patternProperties": 1, "minProperties": "2", "required": 1},
        {"properties": {"\x01": {}}, "required": ["\x01"], "default": "\x01", "description": "\x01"},
    ],
)
def test_other_control_characters_are_allowed(schema: dict[str, object]) -> None:
    assert list(ignored(schema)) == []


CONTROLS = st.characters(max_codepoint=0x80, exclude_characters="[]\\^-")
CLASSES = st.tuples(st.sampled_from("^ab"), CONTROLS, st.sampled_from(["", "-\x7f", "c"])).map(
    "[{0[0]}{0[1]}{0[2]}]".format
)


@given(st.lists(st.sampled_from("ab") | CONTROLS.filter(lambda each: each not in "$()*+.?{|}") | CLASSES, max_size=4))
def test_no_character_is_left_out_of_a_pattern(parts: list[str]) -> None:
    """An answer that lacks one of the pattern's characters is not accepted, unless the schema is refused."""
    schema = {"pattern": f"^{''.join(parts)}$"}
    if not list(ignored(schema)):
        matching = matcher(byte_tokenizer(), schema_grammar(schema))
        for length in range(len(parts)):
            assert not accepts(matching, list(json.dumps("a" * length).encode()))
