"""Tests of the fields of a call of the Responses API."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from msgspec import structs

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind
from llmrun.engine.requests import ChatPrompt
from llmrun.serving.protocol.declarations import Refused
from llmrun.serving.protocol.errors import InvalidField, api_error
from llmrun.serving.protocol.openai_responses.objects import ResponseRequest
from tests.support.protocol.answers import FACTS, SEED, TOOL, chat
from tests.support.protocol.refusals import refused
from tests.support.protocol.response_answers import FLAT_TOOL, LOGPROBS, response

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "function", "name": "look"}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}


def test_switches_have_precedence_over_the_effort() -> None:
    parsed = response(reasoning={"effort": "low"}, enable_thinking=False)
    assert (parsed.request.think, parsed.ignored) == (False, ("reasoning.effort",))


@pytest.mark.parametrize(
    ("fields", "as_chat"),
    [
        ({}, {}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["a"], "logit_bias": {"5": -100}},) * 2,
        ({"seed": 7, "ignore_eos": True, "presence_penalty": 1},) * 2,
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"think_budget": 5, "chat_template_kwargs": {"a": 1}},) * 2,
        ({"tools": [FLAT_TOOL]}, {"tools": [TOOL]}),
        ({"tools": [FLAT_TOOL], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "required"}),
        (
            {"tools": [FLAT_TOOL], "tool_choice": NAMED, "parallel_tool_calls": False},
            {"tools": [TOOL], "tool_choice": TOOL, "parallel_tool_calls": False},
        ),
        (
            {"tools": [FLAT_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        ({"include": [LOGPROBS], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": [LOGPROBS]}, {"logprobs": True}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"grammar": 'root ::= "a"'},) * 2,
    ],
)
def test_the_engine_gets_the_request_of_a_chat(fields: dict[str, Any], as_chat: dict[str, Any]) -> None:
    parsed = response(**fields)
    assert parsed.requests == chat(**as_chat).requests
    assert parsed.ignored == ()


def test_formats_are_those_of_chats() -> None:
    found = response(text={"format": {**FORMAT, "strict": False}}).request.response_format
    assert found is not None
    assert (found.kind, json.loads(found.text), found.origin) == (FormatKind.JSON_SCHEMA, SCHEMA, "text.format.schema")
    found = response(text={"format": {**FORMAT, "strict": True}}).request.response_format
    assert found is not None
    assert (json.loads(found.text), found.strict) == (SCHEMA, True)
    found = response(text={"format": {"type": "json_object"}}).request.response_format
    assert found is not None
    assert (found.kind, found.origin) == (FormatKind.JSON_OBJECT, "text.format")


def test_errors_of_the_engine_name_the_schemas_place() -> None:
    assert api_error(UsageError("text.format.schema: not supported")).param == "text.format.schema"


def test_the_seed_is_that_of_the_answer() -> None:
    assert (response().seed, response().request.seed, response(seed=7).seed) == (SEED, SEED, 7)


def test_definitions_keep_the_order_of_the_client() -> None:
    """Another order would make another prompt."""
    tool = {"strict": True, "parameters": {}, "description": "a", "name": "look", "type": "function", "invented": 1}
    parsed = response(tools=[tool])
    prompt = parsed.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools is not None
    assert [*prompt.tools[0]["function"]] == ["strict", "parameters", "description", "name"]
    assert parsed.ignored == ("tools[].invented",)


REFUSED = {
    name: mark
    for name, hint in get_type_hints(ResponseRequest, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, Refused)
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_that_cannot_be_honored_are_refused(name: str) -> None:
    harmless, advice, _ = REFUSED[name]
    with pytest.raises(InvalidField) as caught:
        response(**{name: "x"})
    assert (caught.value.param, caught.value.code, caught.value.hint) == (name, "unsupported_parameter", advice)
    for value in harmless:
        response(**{name: value})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": FORMAT}, "tools": [FLAT_TOOL]}, "text.format.schema"),
        ({"text": {"format": FORMAT}, "grammar": "a"}, "grammar"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": [5]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [TOOL]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "lost"}}, "tool_choice.name"),
        ({"tools": [FLAT_TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FLAT_TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"tools": [{**FLAT_TOOL, "name": "auto"}], "tool_choice": {**NAMED, "name": "auto"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_invalid_fields_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    refused(response, param, **fields)


def test_a_verbosity_without_effect_is_named() -> None:
    assert response(text={"verbosity": "low"}).ignored == ("text.verbosity",)


def test_models_without_tools_take_none() -> None:
    facts = structs.replace(FACTS, takes_tools=False)
    refused(lambda **fields: response(facts, **fields), "tools", "unsupported_parameter", tools=[FLAT_TOOL])


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"invented": 1}, ("invented",)),
        ({"reasoning": {"summary": "auto"}}, ("reasoning.summary",)),
        ({"include": ["reasoning.encrypted_content"]}, ("include.reasoning.encrypted_content",)),
        ({"service_tier": "flex"}, ("service_tier",)),
        ({"stream_options": {"include_obfuscation": True}}, ("stream_options.include_obfuscation",)),
        ({"stream_options": {"include_obfuscation": False}}, ()),
        ({"store": False, "user": "a", "service_tier": "auto", "prompt_cache_key": "a", "metadata": {"a": "b"}}, ()),
    ],
)
def test_fields_without_effect_are_named(fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert response(**fields).ignored == ignored


def test_thinking_without_a_thinking_model_has_no_effect() -> None:
    parsed = response(structs.replace(FACTS, thinks=False), reasoning={"effort": "low"})
    assert parsed.ignored == ("reasoning.effort",)


def test_the_settings_are_those_that_are_used() -> None:
    settings = response(
        text={"format": FORMAT}, max_output_tokens=5, max_tool_calls=2, reasoning={"effort": "none"}, top_p=0.5
    ).settings
    assert settings["text"] == {"format": {**FORMAT, "description": None}, "verbosity": "medium"}
    assert (settings["temperature"], settings["top_p"]) == (FACTS.default_sampling.temperature, 0.5)
    assert (settings["max_output_tokens"], settings["max_tool_calls"]) == (5, 2)
    assert settings["reasoning"] == {"effort": "none", "summary": None}
