"""Tests that calls and results with empty or missing ids are matched, in all APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llmrun.engine.requests import ChatPrompt
from llmrun.engine.tool_calls.prompting import template_messages
from llmrun.serving.protocol.anthropic.requests import parse_message
from llmrun.serving.protocol.ollama.requests import parse_ollama_chat
from llmrun.serving.protocol.openai.requests import parse_chat
from llmrun.serving.protocol.openai_responses.requests import parse_response
from tests.support.protocol.answers import FACTS, SEED
from tests.support.tool_calls.formats import tools_of

USER = {"role": "user", "content": "Hi"}
Ids = Mapping[str, object]


def chat_body(call: Ids, result: Ids) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}, **call} for name in ("look", "find")]
    results = [{"role": "tool", "content": text, **result} for text in ("1", "2")]
    return {"messages": [USER, {"role": "assistant", "tool_calls": calls}, *results]}


def response_body(call: Ids, result: Ids) -> dict[str, Any]:
    calls = [{"type": "function_call", "name": name, "arguments": "{}", **call} for name in ("look", "find")]
    results = [{"type": "function_call_output", "output": text, **result} for text in ("1", "2")]
    return {"input": [USER, *calls, *results]}


def message_body(call: Ids, result: Ids) -> dict[str, Any]:
    calls = [{"type": "tool_use", "name": name, "input": {}, **call} for name in ("look", "find")]
    results = [{"type": "tool_result", "content": text, **result} for text in ("1", "2")]
    turns = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return {"model": "fake", "max_tokens": 9, "messages": turns}


def ollama_body(call: Ids, result: Ids) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": {}}, **call} for name in ("look", "find")]
    results = [{"role": "tool", "content": text, **result} for text in ("1", "2")]
    return {"model": "fake", "messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]}


@pytest.mark.parametrize(
    ("parse", "body", "of_call", "of_result"),
    [
        (parse_chat, chat_body, "id", "tool_call_id"),
        (parse_response, response_body, "call_id", "call_id"),
        (parse_message, message_body, "id", "tool_use_id"),
        (parse_ollama_chat, ollama_body, "id", "tool_call_id"),
    ],
)
@pytest.mark.parametrize("of_calls", ["", None, "missing"])
@pytest.mark.parametrize("of_results", ["", None, "missing"])
def test_ids_may_be_empty_or_missing(
    parse: Callable[[dict[str, Any], Any, int], Any],
    body: Callable[[Ids, Ids], dict[str, Any]],
    of_call: str,
    of_result: str,
    of_calls: str | None,
    of_results: str | None,
) -> None:
    no_ids: Ids = {}
    given = body(
        no_ids if of_calls == "missing" else {of_call: of_calls},
        no_ids if of_results == "missing" else {of_result: of_results},
    )
    prompt = parse(given, FACTS, SEED).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    found = template_messages(prompt.messages, tools_of("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"))
    assert [(one["name"], one["content"]) for one in found if one["role"] == "tool"] == [("look", "1"), ("find", "2")]
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in found[2:]]
    assert all(ids)
    assert ids[0] != ids[1]
