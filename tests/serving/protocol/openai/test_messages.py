"""Tests of the messages of a conversation."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.engine.requests import ChatPrompt
from llmrun.serving.protocol.openai.messages import call_ids
from tests.support.protocol.answers import USER, chat
from tests.support.protocol.refusals import refused

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def named(name: str) -> dict[str, Any]:
    return {"function": {"name": name}}


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = chat(messages=[*messages]).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return [dict(message) for message in prompt.messages]


def test_a_conversation_with_tools_is_kept() -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    assert read(*conversation) == conversation


def test_developers_are_the_system() -> None:
    assert read({"role": "developer", "content": "Be brief."}) == [{"role": "system", "content": "Be brief."}]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    assert read({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": "a", "reasoning": "Hm."}, {"content": "a", "reasoning_content": "Hm."}),
        ({"content": "a", "reasoning_content": ""}, {"content": "a", "reasoning_content": ""}),
    ],
)
def test_past_answers_are_read(answer: dict[str, Any], kept: dict[str, Any]) -> None:
    assert read(USER, {"role": "assistant", **answer})[1] == {"role": "assistant", **kept}


def test_answers_of_the_official_client_can_be_sent_back() -> None:
    """It writes every field, most of which are null."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[USER, answer]).ignored == ()


def test_arguments_may_be_an_object() -> None:
    for arguments in ('{"a": 1}', {"a": 1}, None):
        call = {"id": "x", "function": {"name": "look", "arguments": arguments}}
        message = read(USER, {"role": "assistant", "tool_calls": [call]})[1]
        assert message["tool_calls"][0]["function"]["arguments"] == arguments or arguments is None


def test_results_need_no_content() -> None:
    assert read(USER, {"role": "tool", "content": None})[1] == {"role": "tool", "content": ""}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "function", "content": "Hi", "name": "f"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "Hi", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "content": "", "function_call": {}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [named("")]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}], "messages[0].tool_calls[0].custom"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "other"}]}], "messages[0].tool_calls[0].type"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, param: str) -> None:
    refused(chat, param, messages=messages)


@pytest.mark.parametrize("kind", ["input_audio", "file", "video"])
def test_other_content_than_text_and_images_is_refused(kind: str) -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "https://example.org/a.png"}}]
    message = refused(
        chat, "messages[1].content[1]", "unsupported_parameter", messages=[USER, {"role": "user", "content": content}]
    )
    assert kind in message


def test_call_ids_are_found() -> None:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "look"}}]}]
    assert call_ids(messages) == {"call_1"}
