"""Tests of what is refused before llguidance compiles it: hostile input ends quickly and in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.keywords import subschemas
from llmrun.engine.constraint.limits import check_grammar_text, check_schema, compile_probe
from llmrun.engine.constraint.process import ConstraintProcess
from tests.support.constraint.hostile_grammars import (
    GRAMMARS,
    HARMLESS_GRAMMARS,
    HARMLESS_REGEXES,
    HARMLESS_SCHEMAS,
    REGEXES,
    SCHEMAS,
    regex_grammar,
)
from tests.support.constraint.matchers import accepts, byte_tokenizer, checked_schema, matcher, schema_grammar
from tests.support.tiers import examples

pytestmark = pytest.mark.push

ENOUGH_S = 2.0  # CPU time of the compiler and its process is limited to 1.2 s


@pytest.fixture(scope="module")
def process() -> Iterator[ConstraintProcess]:
    made = ConstraintProcess()
    yield made
    made.close()


def refusal_of_schema(text: str, process: ConstraintProcess) -> str | None:
    """Return the reason for refusing a schema, as a user sees it, or None."""
    try:
        schema = checked_schema(text)
        return compile_probe(schema_grammar(schema), schema, process=process)
    except UsageError as error:
        return str(error)


def refusal_of_text(text: str, grammar: Callable[[str], str], process: ConstraintProcess) -> str | None:
    try:
        check_grammar_text(text)
    except UsageError as error:
        return str(error)
    return compile_probe(grammar(text), process=process)


def assert_one_line(said: str | None) -> None:
    assert said
    assert said.isprintable()
    assert len(said) < 400
    assert "its process" not in said


# --- hostile input


@pytest.mark.night
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_refused_in_one_line(name: str, process: ConstraintProcess) -> None:
    before = time.perf_counter()
    assert_one_line(refusal_of_schema(SCHEMAS[name], process))
    assert time.perf_counter() - before < 3 * ENOUGH_S  # by the clock, on a busy machine


@pytest.mark.night
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_is_refused_in_one_line(name: str, process: ConstraintProcess) -> None:
    assert_one_line(refusal_of_text(GRAMMARS[name], str, process))


@pytest.mark.parametrize("name", REGEXES)
def test_a_hostile_regex_is_refused_in_one_line(name: str, process: ConstraintProcess) -> None:
    assert_one_line(refusal_of_text(REGEXES[name], regex_grammar, process))


@pytest.mark.parametrize("name", HARMLESS_SCHEMAS)
def test_a_large_but_simple_schema_compiles(name: str, process: ConstraintProcess) -> None:
    assert refusal_of_schema(HARMLESS_SCHEMAS[name], process) is None
    assert not matcher(byte_tokenizer(), schema_grammar(json.loads(HARMLESS_SCHEMAS[name]))).is_error()


@pytest.mark.parametrize("name", HARMLESS_GRAMMARS)
def test_a_simple_grammar_compiles(name: str, process: ConstraintProcess) -> None:
    assert refusal_of_text(HARMLESS_GRAMMARS[name], str, process) is None


@pytest.mark.parametrize("name", HARMLESS_REGEXES)
def test_a_simple_regex_compiles(name: str, process: ConstraintProcess) -> None:
    assert refusal_of_text(HARMLESS_REGEXES[name], regex_grammar, process) is None


def test_what_the_trial_accepts_fits_the_stack_here(process: ConstraintProcess) -> None:
    """Find the longest chain that the trial accepts, and compile one of four times the length."""

    def rules(count: int) -> str:
        return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "a"'

    accepted, refused = 100, 3000
    while refused - accepted > 50:
        middle = (accepted + refused) // 2
        if compile_probe(rules(middle), process=process) is None:
            accepted = middle
        else:
            refused = middle
    assert 300 < accepted < 2000
    assert not matcher(byte_tokenizer(), rules(4 * accepted)).is_error()


# --- messages


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"properties": {"a/b": {"not": {"type": "null"}}}}', '/properties/a~1b/not: "not" is not supported'),
        (
            '{"properties": {"not": {"type": "string", "format": "iri"}}}',
            "/properties/not/format: unknown format: iri",
        ),
        ('{"type": "strng"}', "Invalid type: strng"),
        (
            '{"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [{}]}',
            "the schema is invalid: /items: ",
        ),
        (
            '{"items": {"uniqueItems": false}, "properties": {"a": {"uniqueItems": true}}}',
            '/properties/a/uniqueItems: "uniqueItems" is not supported',
        ),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', '"oneOf" is supported only if'),
        ('{"minimum": 5, "maximum": 3, "type": "number"}', "no text can match it: minimum (5)"),
        ('{"$ref": "#"}', "no text can match it"),
        ("false", "JSON Schema: the schema is false, so no text can match it"),
        ('{"$ref": "http://a/b"}', "a $ref may not point to another document: 'http://a/b'"),
        ('{"pattern": "("}', "regex parse error: ( ^ error: unclosed group"),
        (json.dumps({"$ref": "\x1b" * 999}), "Invalid URI reference '"),
        ("3", "JSON Schema: a schema is an object, true or false, not int"),
        ("{", "JSON Schema: not valid JSON: Expecting"),
        ('{"const": NaN}', "JSON Schema: not valid JSON: NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', 'JSON Schema: not valid JSON: the key "a" occurs twice in one object'),
        ('{"const": "\\ud800"}', "JSON Schema: a string has an unpaired surrogate"),
        ("\ud800", "JSON Schema: not UTF-8 text"),
        ('{"items": ' * 101 + "{}" + "}" * 101, "JSON Schema: nested more than 100 levels deep"),
        ('"' + "x" * (5 << 20) + '"', "JSON Schema: too large: "),
        ('{"x-guidance": {}}', "JSON Schema: /x-guidance: compiler options"),
        ('{"enum": [[{"a": -9007199254740993}]]}', "JSON Schema: /enum: integers beyond 9,007,199,254,740,992"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', "JSON Schema: /$schema: draft-03 is not supported"),
        ('{"properties": {"a": {"disallow": "any"}}}', 'JSON Schema: /properties/a/disallow: "disallow" has no effect'),
    ],
)
def test_a_refusal_names_the_keyword_and_the_place(schema: str, said: str, process: ConstraintProcess) -> None:
    refusal = refusal_of_schema(schema, process)
    assert_one_line(refusal)
    assert str(refusal).startswith(said)


def test_schemas_are_returned_as_they_are() -> None:
    text = '{"const": {"x-guidance": 1, "extends": 9007199254740992}, "properties": {"extends": true, "if": {}}}'
    assert check_schema(text) == json.loads(text)
    assert check_schema("true") is True


def test_a_grammar_may_not_be_empty() -> None:
    with pytest.raises(UsageError, match="--regex: empty"):
        check_grammar_text("", "--regex")


# --- keywords

DRAFTS = [
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
]
# Each assertion keyword of 2020-12 and older drafts: a schema, and a value that it does not allow.
KEYWORDS: dict[str, tuple[dict[str, Any], Any]] = {
    "$ref": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}}, 1),
    "additionalItems": ({"items": [{}], "additionalItems": False}, [1, 2]),
    "additionalProperties": ({"additionalProperties": False}, {"a": 1}),
    "allOf": ({"allOf": [{"type": "null"}]}, 1),
    "anyOf": ({"anyOf": [{"type": "null"}]}, 1),
    "const": ({"const": 1}, 2),
    "contains": ({"contains": {"type": "null"}}, [1]),
    "dependencies": ({"dependencies": {"a": ["b"]}}, {"a": 1}),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"dependentSchemas": {"a": False}}, {"a": 1}),
    "enum": ({"enum": [1]}, 2),
    "exclusiveMaximum": ({"exclusiveMaximum": 1}, 1),
    "exclusiveMinimum": ({"exclusiveMinimum": 1}, 1),
    "format": ({"format": "ipv4"}, "x"),
    "format of any name": ({"format": "json-pointer"}, "x"),
    "if then": ({"if": True, "then": False}, 1),
    "if else": ({"if": False, "else": False}, 1),
    "items": ({"items": {"type": "null"}}, [1]),
    "maxItems": ({"maxItems": 1}, [1, 2]),
    "maxLength": ({"maxLength": 1}, "ab"),
    "maxProperties": ({"maxProperties": 1}, {"a": 1, "b": 2}),
    "maximum": ({"maximum": 1}, 2),
    "minContains": ({"contains": {"type": "null"}, "minContains": 2}, [None]),
    "maxContains": ({"contains": {"type": "null"}, "maxContains": 1}, [None, None]),
    "minItems": ({"minItems": 1}, []),
    "minLength": ({"minLength": 1}, ""),
    "minProperties": ({"minProperties": 1}, {}),
    "minimum": ({"minimum": 1}, 0),
    "multipleOf": ({"multipleOf": 2}, 3),
    "not": ({"not": {"type": "integer"}}, 1),
    "oneOf": ({"oneOf": [{"type": "null"}]}, 1),
    "pattern": ({"pattern": "^a$"}, "b"),
    "patternProperties": ({"patternProperties": {"^a$": {"type": "null"}}}, {"a": 1}),
    "prefixItems": ({"prefixItems": [{"type": "null"}]}, [1]),
    "properties": ({"properties": {"a": {"type": "null"}}}, {"a": 1}),
    "propertyNames": ({"propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "required": ({"required": ["a"]}, {}),
    "type": ({"type": "null"}, 1),
    "unevaluatedItems": ({"unevaluatedItems": False}, [1]),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, {"a": 1}),
    "uniqueItems": ({"uniqueItems": True}, [1, 1]),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, 1),
    "divisibleBy": ({"divisibleBy": 2}, 3),
    "disallow": ({"disallow": ["integer"]}, 1),
    "extends": ({"extends": {"type": "null"}}, 1),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", KEYWORDS)
def test_no_keyword_is_ignored_in_silence(name: str, draft: str, process: ConstraintProcess) -> None:
    """A keyword is enforced, or refused with its name, whichever draft the schema declares."""
    schema, wrong = KEYWORDS[name]
    refusal = refusal_of_schema(json.dumps({"$schema": draft, **schema}), process)
    if refusal:
        assert any(keyword in refusal for keyword in schema) or "the schema is invalid" in refusal
    else:
        matching = matcher(byte_tokenizer(), schema_grammar({"$schema": draft, **schema}))
        assert not accepts(matching, list(json.dumps(wrong).encode()))


def test_the_keywords_are_those_of_the_drafts() -> None:
    known = {keyword for name in KEYWORDS for keyword in (*name.split()[:1], *schema_keys(KEYWORDS[name][0]))}
    metaschema = Draft202012Validator.META_SCHEMA
    assert metaschema["$id"] == DRAFTS[-1]
    assert set(Draft202012Validator.VALIDATORS) - known == {"$recursiveRef"} & set(Draft202012Validator.VALIDATORS)


def schema_keys(schema: dict[str, Any]) -> list[str]:
    return [key for _, each in subschemas(schema) for key in each]


# --- any input

KEYS = st.sampled_from(
    sorted(
        {key for schema, _ in KEYWORDS.values() for key in schema}
        | {"$schema", "$id", "$defs", "$anchor", "x-guidance"}
    )
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "date", "a*", "^[ab]{2,}$", *DRAFTS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)
SHARED = ConstraintProcess()  # hypothesis does not mix with fixtures of a function; it ends with pytest


@pytest.mark.night
@settings(max_examples=examples(400), deadline=10_000)
@given(VALUES | st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_json_compiles_or_is_refused_in_one_line(value: object) -> None:
    said = refusal_of_schema(json.dumps(value), SHARED)
    if said is None:
        assert not matcher(byte_tokenizer(), schema_grammar(checked_schema(json.dumps(value)))).is_error()
    else:
        assert_one_line(said)


@settings(max_examples=examples(200), deadline=10_000)
@given(st.text(max_size=40) | st.text(alphabet='start: "a|()[]{}*+?~&/%-><\n0', max_size=60))
def test_any_text_is_a_grammar_or_refused_in_one_line(text: str) -> None:
    for make in (str, regex_grammar):
        if said := refusal_of_text(text, make, SHARED):
            assert_one_line(said)
