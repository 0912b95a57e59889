"""Tests of finding keywords in a schema."""

from __future__ import annotations

from llmrun.engine.constraint.keywords import ignored, place_of, subschemas

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
