"""Tests of the grammar that enforces tool calls."""

from __future__ import annotations

from contextlib import suppress
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.thinking import Placeholders
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.openings import spelled_tools
from llmrun.engine.tool_calls.schemas import Tool, read_tools
from tests.support.tiers import examples
from tests.support.tool_calls.formats import Case, real_case, tools_of
from tests.support.tool_calls.grammars import accepts, problem

HERMES = real_case("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use")
TEXTUAL = real_case("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", control=False)
QWEN = real_case("Qwen3-Coder", control=False)
GEMMA = real_case("google-gemma-4-31B-it")
LFM = real_case("LFM2.5-8B-A1B")
LLAMA = real_case("meta-llama-Llama-3.1-8B-Instruct")
OSS = real_case("openai-gpt-oss-120b")
KIMI = real_case("Kimi-K3")
MINIMAX = real_case("MiniMax-M3")
CASES = [HERMES, TEXTUAL, QWEN, GEMMA, LFM, LLAMA, OSS, KIMI, MINIMAX, real_case("openbmb-MiniCPM5-1B", control=False)]


def tools(*schemas: dict[str, Any]) -> list[Tool]:
    """Return tools "a", "b", ... with these parameters."""
    return read_tools(
        [
            {"type": "function", "function": {"name": name, "parameters": each}}
            for name, each in zip("abc", schemas, strict=False)
        ]
    )


def arguments(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def call(case: Case, tool: str = "a", /, **given_: Any) -> str:
    return case.format.written([(tool, given_, "callabc01")])


@pytest.mark.parametrize("case", [HERMES, TEXTUAL], ids=["token", "text"])
def test_text_is_free_until_a_call_begins(case: Case) -> None:
    grammar = tool_grammar(case.spelling, tools(NOTHING), "auto")
    assert accepts(case, grammar, "")
    assert accepts(case, grammar, "1 < 2 { <tool")
    assert accepts(case, grammar, f"Let me see.\n{call(case)}\n and {call(case)}\nDone.")
    assert not accepts(case, grammar, f"Let me see. {call(case)[:-14]}")
    assert not accepts(case, grammar, call(case, "b"))


def test_at_most_one_call_if_they_are_not_parallel() -> None:
    for case in (HERMES, TEXTUAL):
        grammar = tool_grammar(case.spelling, tools(NOTHING), "auto", parallel=False)
        assert accepts(case, grammar, f"Well. {call(case)} Done.")
        assert not accepts(case, grammar, f"{call(case)} {call(case)}")


def test_a_named_tool_is_called_once() -> None:
    grammar = tool_grammar(HERMES.spelling, tools(NOTHING, NOTHING), "b")
    assert accepts(HERMES, grammar, call(HERMES, "b"))
    assert not accepts(HERMES, grammar, call(HERMES, "a"))
    assert not accepts(HERMES, grammar, call(HERMES, "b") + call(HERMES, "b"))
    with pytest.raises(UsageError, match="no such tool: c"):
        tool_grammar(HERMES.spelling, tools(NOTHING), "c")


def test_without_tools_nothing_can_be_required() -> None:
    assert accepts(HERMES, tool_grammar(HERMES.spelling, [], "auto"), "Hello.")
    with pytest.raises(UsageError):
        tool_grammar(HERMES.spelling, [], "required")


def test_llama_may_answer_with_anything_but_an_object() -> None:
    grammar = tool_grammar(LLAMA.spelling, tools(NOTHING), "auto")
    assert accepts(LLAMA, grammar, "A set is {1, 2}.")
    assert accepts(LLAMA, grammar, call(LLAMA))
    assert not accepts(LLAMA, grammar, '{"name": "other"}')


def test_gpt_oss_may_write_the_recipient_in_two_places() -> None:
    names = {OSS.tokenizer.token_text(token): letter for letter, token in OSS.spelling.tokens.items()}
    other = f"{names['<|channel|>']}commentary to=functions.a{names['<|message|>']}{{}}{names['<|call|>']}"
    for choice in ("auto", "required"):
        grammar = tool_grammar(OSS.spelling, tools(NOTHING), choice)
        assert accepts(OSS, grammar, call(OSS))
        assert accepts(OSS, grammar, other)


def test_tokens_that_end_the_answer_are_not_required() -> None:
    end = OSS.spelling.tokens[call(OSS)[-1]]
    found = tools_of("openai-gpt-oss-120b").tool_format
    assert found is not None
    spelling = spelled_tools(found, Placeholders(OSS.tokenizer), {end})
    grammar = tool_grammar(spelling, tools(NOTHING), "required")
    assert accepts(OSS, grammar, call(OSS)[:-1])


@pytest.mark.push
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a b", "<b>\n\n", "it's", "42"], []),
        ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
        ({"enum": ["x y", "z"]}, ["x y", "z"], ["x", ""]),
        ({"type": "integer"}, [7, -1], [1.5, True, None]),
        ({"type": "integer", "minimum": 3}, [3], [2]),
        ({"type": "boolean"}, [True, False], [1, None]),
        ({"type": ["string", "null"]}, [None, "a"], [True]),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer"}]}, ["ab", 4], [True]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, [[1], [1, 2]], [[], ["a"]]),
        (
            arguments(x={"type": "string"}, y={"type": "boolean"}),
            [{"x": "a", "y": True}],
            [{"x": "a"}],
        ),
        ({"$ref": "#/$defs/n"}, [5], ["a b"]),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_match_the_schema(case: Case, schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    root = {**arguments(v=schema), "$defs": {"n": {"type": "integer"}}}
    grammar = tool_grammar(case.spelling, tools(root), "required")
    assert problem(case, grammar) == ""
    for value in good:
        if value == "it's" and case is LFM:
            continue  # Python writes it with the other quotes, and so it does
        assert accepts(case, grammar, call(case, v=value)), value
    for value in bad:
        assert not accepts(case, grammar, call(case, v=value)), value


@pytest.mark.push
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arguments_that_are_not_required_may_be_left_out(case: Case) -> None:
    names = ("p", "q", "r")
    schema = {**arguments(**{name: {"type": "integer"} for name in names}), "required": ["q"]}
    grammar = tool_grammar(case.spelling, tools(schema), "required")
    for each in ({"q": 1}, {"p": 0, "q": 1}, {"q": 1, "r": 2}, {"p": 0, "q": 1, "r": 2}):
        assert accepts(case, grammar, call(case, **each))
    for each in ({}, {"p": 0}, {"p": 0, "r": 2}, {"q": 1, "x": 2}):
        assert not accepts(case, grammar, call(case, **each))
    grammar = tool_grammar(case.spelling, tools({**schema, "required": []}), "required")
    for each in ({}, {"p": 0}, {"p": 0, "r": 2}, {"r": 2}):
        assert accepts(case, grammar, call(case, **each))


def test_recursive_schemas_are_enforced() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}
    schema = {**arguments(v={"$ref": "#/$defs/node"}), "$defs": {"node": node}}
    for case in CASES:
        grammar = tool_grammar(case.spelling, tools(schema), "required")
        assert accepts(case, grammar, call(case, v={"next": {"next": {"v": 1}}, "v": 2}))
        assert not accepts(case, grammar, call(case, v={"next": {"next": {"v": "x"}}}))


@pytest.mark.parametrize("name", ["", "a b", 'a"', "a\n", "ä", "<tool_call>", "%json", "a" * 129, "a/b", "{", "\ud800"])
def test_names_have_only_some_characters(name: str) -> None:
    with pytest.raises(UsageError, match="invalid tool name"):
        read_tools([{"type": "function", "function": {"name": name}}])


@pytest.mark.parametrize("bad", [None, 1, "x", {}, {"function": {}}, {"function": {"name": 1}}, {"function": []}])
def test_definitions_must_have_openais_form(bad: object) -> None:
    with pytest.raises(UsageError, match="invalid tool"):
        read_tools([bad])
    with pytest.raises(UsageError, match="same name"):
        read_tools([{"function": {"name": "a"}}, {"function": {"name": "a"}}])
    with pytest.raises(UsageError, match="not a JSON schema"):
        read_tools([{"function": {"name": "a", "parameters": [1]}}])


HOSTILE = [
    '"',
    "\\",
    "\n",
    "\x00",
    "\x7f",
    "\u2028",
    "\ufdd1",
    "\ud800",
    "</parameter>",
    "<tool_call>",
    "%json {}",
    "/",
    "#",
]
HOSTILE += [
    "%llguidance {}",
    "start: x",
    "{",
    "}",
    "<[5]>",
    "//",
    "'",
    "|",
    "$",
    "^",
    "[[lazy]]",
    "*/",
    '<|"|>',
    "]]>",
    "=",
]
WORD = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5), st.sampled_from("abc"))
NAMES = st.lists(WORD, max_size=3).map("".join)
KEYWORDS = (
    "minimum",
    "maxLength",
    "minItems",
    "pattern",
    "$ref",
    "required",
    "format",
    "const",
    "items",
    "uniqueItems",
    "not",
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.floats(), NAMES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, st.sampled_from(KEYWORDS)), inner)
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(
    ["string", "integer", "number", "boolean", "null", "object", "array", ["string", "null"], "odd", 5]
)
SCHEMAS = st.recursive(
    st.one_of(
        st.fixed_dictionaries({"type": KINDS}),
        st.fixed_dictionaries({"enum": st.lists(VALUES, max_size=3)}),
        st.fixed_dictionaries({"type": KINDS, "description": NAMES, "default": VALUES}),
        st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=3),
        VALUES,
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.dictionaries(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=3), min_size=1),
    ),
    max_leaves=5,
)


def grammar_or_refusal(case: Case, given_: list[Tool], choice: str) -> str | None:
    """Return the grammar, or None if it is refused with a message of one printable line."""
    refusal = ""
    try:
        return tool_grammar(case.spelling, given_, choice)
    except LlmrunError as error:
        refusal = str(error)
    assert refusal.isprintable()
    return None


@pytest.mark.night
@given(st.sampled_from(CASES), st.dictionaries(NAMES, SCHEMAS, max_size=3), st.sampled_from(["auto", "required"]))
@settings(max_examples=examples(150), deadline=None)
def test_hostile_schemas_are_escaped_or_refused(case: Case, properties: dict[str, Any], choice: str) -> None:
    """A grammar that llguidance compiles must still be one for a call of "a", whatever the schema contains."""
    definition = {
        "type": "function",
        "function": {"name": "a", "parameters": {"type": "object", "properties": properties}},
    }
    grammar = grammar_or_refusal(case, read_tools([definition]), choice)
    if grammar is None:
        return
    wrong = problem(case, grammar)
    if wrong:  # llguidance refuses the schema itself, or a pattern in it; it must not be a syntax error of ours
        assert "failed to compile JSON schema" in wrong or "pattern" in str(properties), wrong
        return
    assert not accepts(case, grammar, call(case, "b"))


@pytest.mark.push
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_huge_schemas_end_quickly(case: Case) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(2_000):
        deep = {"type": "array", "items": deep}
    wide = {f"p{number}": {"type": "string", "enum": ["x"] * 50} for number in range(300)}
    doubled: dict[str, Any] = {"l0": {"type": "integer"}}
    for number in range(1, 40):
        doubled[f"l{number}"] = {"anyOf": [{"$ref": f"#/$defs/l{number - 1}"}] * 2}
    loop = {"$ref": "#/$defs/loop"}
    schemas = [
        arguments(v=deep),
        arguments(**wide),
        {**arguments(v={"$ref": "#/$defs/l39"}), "$defs": doubled},
        {**arguments(v=loop), "$defs": {"loop": loop}},
        {
            **arguments(v={"anyOf": [loop, {"type": "object", "properties": {"a": loop}}]}),
            "$defs": {"loop": {"anyOf": [loop]}},
        },
    ]
    for schema in schemas:
        began = process_time()
        with suppress(UsageError):  # too deep
            grammar_or_refusal(case, tools(schema), "required")
        assert process_time() - began < 2


def test_objects_in_the_arguments_of_a_strict_tool_are_closed() -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    strict, other = read_tools(
        [
            {"type": "function", "function": {"name": "a", "strict": True, "parameters": parameters}},
            {"type": "function", "function": {"name": "b", "parameters": parameters}},
        ]
    )
    assert strict.properties()["a"] == {**parameters["properties"]["a"], "additionalProperties": False}
    assert other.properties() == parameters["properties"]
