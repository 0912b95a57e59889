"""Tests of custom tools, whose input is a text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.engine.requests import ChatPrompt, Event, ToolCallDelta
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.schemas import read_tools
from llmrun.serving.protocol.openai.custom_tools import InputReader, custom_arguments
from tests.support.protocol.answers import (
    USER,
    called,
    chat,
    chat_answer,
    ended,
    official_chat,
    run,
)
from tests.support.protocol.ollama import chat_answer as ollama_answer
from tests.support.protocol.ollama import whole
from tests.support.protocol.refusals import refused
from tests.support.tool_calls.formats import real_case
from tests.support.tool_calls.grammars import CODEX_PATCH, accepts

PLAIN = {"type": "custom", "custom": {"name": "run", "description": "Runs code.", "format": {"type": "text"}}}
PATCH = '*** Begin Patch\n*** Update File: a\n@@ f\n-x "é"\t\\\n+y\n*** End Patch\n'
CALL = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": 'a "b"\n'}}


def with_grammar(definition: str, syntax: str = "lark", name: str = "patch") -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "format": grammar}}


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = chat(**fields).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_the_model_sees_a_function_with_one_text() -> None:
    tools = prompt_of(tools=[PLAIN, with_grammar("[0-9]+", "regex")]).tools
    assert tools is not None
    plain, counted = (tool["function"] for tool in tools)
    assert (plain["name"], plain["description"]) == ("run", "Runs code.")
    assert plain["parameters"]["properties"] == {"input": {"type": "string"}}
    assert counted["parameters"]["properties"]["input"] == {
        "type": "string",
        "description": "A text that matches this regular expression:\n[0-9]+",
    }


@pytest.mark.push
@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "GLM-4.6", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "openai-gpt-oss-120b"]
)
def test_the_grammar_of_the_input_is_enforced(name: str) -> None:
    """Models write the input as JSON, as raw text between tags, or as JSON after a name."""
    case = real_case(name)
    for tool, good, bad in (
        (with_grammar(CODEX_PATCH), PATCH, PATCH.replace("-x", "x")),
        (with_grammar(r"[a-z]+\n\"?", "regex"), 'abc\n"', "abc"),
        (PLAIN, PATCH, None),
    ):
        tools = read_tools(prompt_of(tools=[tool]).tools or ())
        grammar = tool_grammar(case.spelling, tools, "required")
        assert accepts(case, grammar, case.format.written([(tools[0].name, {"input": good}, "callabc01")]))
        if bad is not None:
            assert not accepts(case, grammar, case.format.written([(tools[0].name, {"input": bad}, "callabc01")]))


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (with_grammar("a", "ebnf"), "tools[0].custom.format.grammar.syntax"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "json"}}}, "tools[0].custom.format.type"),
    ],
)
def test_invalid_formats_are_refused(tool: Any, param: str) -> None:
    refused(chat, param, tools=[tool])


def test_grammars_that_cannot_be_enforced_are_refused() -> None:
    with pytest.raises(UsageError, match="tools: the grammar of patch cannot be enforced: other is not defined"):
        read_tools(prompt_of(tools=[with_grammar("start: other")]).tools or ())


def test_names_are_unique_among_all_kinds_of_tools() -> None:
    refused(chat, "tools[1].custom.name", tools=[{"function": {"name": "run"}}, PLAIN])


def test_tools_of_other_servers_are_left_out_and_named() -> None:
    parsed = chat(tools=[{"type": "web_search", "filters": {}}, PLAIN, {"type": "mcp"}, {"type": "web_search"}])
    prompt = parsed.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools or ()] == ["run"]
    assert parsed.ignored == ("tools.web_search", "tools.mcp")
    assert prompt_of(tools=[{"type": "web_search"}]).tools is None


def test_custom_tools_can_be_chosen() -> None:
    choice = {"type": "custom", "custom": {"name": "run"}}
    assert prompt_of(tools=[PLAIN], tool_choice=choice).tool_choice == "run"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
    prompt = prompt_of(tools=[PLAIN, with_grammar("a", "regex")], tool_choice=allowed)
    assert (prompt.tool_choice, len(prompt.tools or ())) == ("required", 1)


def test_past_calls_become_calls_of_the_function() -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1"}]
    function = prompt_of(messages=messages).messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "run", "arguments": custom_arguments('a "b"\n')}


def calls(*pieces: str) -> list[tuple[int, Event]]:
    """Return the events of an answer that calls a custom tool with these pieces of arguments, and then a function."""
    found: list[tuple[int, Event]] = [(0, called(ToolCallDelta(0, "call_a", "run")))]
    found += [(0, called(ToolCallDelta(0, arguments=piece))) for piece in pieces]
    return [*found, (0, called(ToolCallDelta(1, "call_b", "look", "{}"))), (0, ended(FinishReason.TOOL_CALLS))]


def test_answers_have_the_input_as_text() -> None:
    answer = chat_answer(tools=[PLAIN, {"function": {"name": "look"}}])
    chunks = run(answer, calls('{"in', 'put": "a \\', '"b\\u00e9', '"}'))
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces == [
        {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "run", "input": ""}},
        {"index": 0, "custom": {"input": "a "}},
        {"index": 0, "custom": {"input": '"bé'}},
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    found = official_chat(answer.whole()).choices[0].message.tool_calls
    assert found is not None
    assert [call.to_dict() for call in found] == [
        {"id": "call_a", "type": "custom", "custom": {"name": "run", "input": 'a "bé'}},
        {"id": "call_b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]


def test_ollamas_api_knows_only_functions() -> None:
    body = whole(ollama_answer(tools=[PLAIN]), [event for _, event in calls('{"input": "a\\n"}')])
    first = body["message"]["tool_calls"][0]["function"]
    assert (first["name"], first["arguments"]) == ("run", {"input": "a\n"})


@given(st.text(), st.lists(st.integers(0, 400), max_size=8), st.booleans(), st.booleans())
def test_the_input_does_not_depend_on_the_pieces(text: str, cuts: list[int], escapes: bool, is_cut: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escapes)
    places = sorted({0, len(arguments), *(cut % len(arguments) for cut in cuts)})
    reader = InputReader()
    pieces = [arguments[start:end] for start, end in pairwise(places)]
    if is_cut:
        assert text.startswith("".join(map(reader.add, pieces[:-1])))
    else:
        assert "".join(map(reader.add, pieces)) == text


def test_cut_and_strange_arguments_give_what_there_is() -> None:
    for arguments, expected in (('{"input": "a\\', "a"), ('{"input', ""), ('{"x": 1}', ""), ('{ "input" :"a', "a")):
        assert InputReader().add(arguments) == expected
