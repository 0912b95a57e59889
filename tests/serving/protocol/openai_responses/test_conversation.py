"""Tests of the input of a response."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import ChatPrompt
from llmrun.serving.protocol.openai_responses.requests import parse_response
from tests.support.protocol.answers import FACTS, SEED, chat
from tests.support.protocol.refusals import refused
from tests.support.protocol.response_answers import answered, response, response_answer, said_and_called

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_a", "output": "found"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
AS_CHAT_CALL = {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def messages(**fields: Any) -> list[Any]:
    prompt = response(**fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return [*prompt.messages]


def test_a_text_is_a_user_message() -> None:
    assert messages(input="Hi") == [USER]


def test_instructions_precede_the_input() -> None:
    assert messages(instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    assert messages(instructions="") == [USER]


def test_system_messages_at_the_beginning_become_one() -> None:
    given = [{"role": "developer", "content": "Be kind."}, USER, {"role": "system", "content": "Stop."}]
    assert messages(instructions="Be brief.", input=given) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        USER,
        {"role": "system", "content": "Stop."},
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, USER),
        ({"role": "developer", "content": "Hi"}, {"role": "system", "content": "Hi"}),
        (
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
            },
            {"role": "assistant", "content": "Hi"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        (OUTPUT, {"role": "tool", "content": "found", "tool_call_id": "call_a"}),
        (
            {**OUTPUT, "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "tool", "content": "a\nb", "tool_call_id": "call_a"},
        ),
        (CALL, {"role": "assistant", "content": "", "tool_calls": [AS_CHAT_CALL]}),
        (THOUGHT, {"role": "assistant", "content": "", "reasoning_content": "Hm."}),
    ],
)
def test_items_become_messages(item: dict[str, Any], message: dict[str, Any]) -> None:
    assert messages(input=[item]) == [message]
    assert response(input=[item]).ignored == ()


def test_the_items_of_one_answer_become_one_message() -> None:
    text = {"role": "assistant", "content": "So"}
    second = {**CALL, "call_id": "call_b"}
    assert messages(input=[THOUGHT, text, CALL, second, OUTPUT, THOUGHT, text, text]) == [
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "Hm.",
            "tool_calls": [AS_CHAT_CALL, {**AS_CHAT_CALL, "id": "call_b"}],
        },
        {"role": "tool", "content": "found", "tool_call_id": "call_a"},
        {"role": "assistant", "content": "So", "reasoning_content": "Hm."},
        text,
    ]


def test_thinking_begins_an_answer() -> None:
    found = messages(input=[CALL, THOUGHT])
    assert [each.get("reasoning_content") for each in found] == [None, "Hm."]


def test_an_answer_can_be_sent_back_as_it_was_received() -> None:
    """The messages are those of a chat, so that the next prompt finds its cached prefix."""
    body = answered(response_answer(), *said_and_called())
    found = response(input=[USER, *body["output"]])
    message = {
        "role": "assistant",
        "content": "So",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    }
    assert found.ignored == ()
    assert found.request.prompt == chat(messages=[USER, message]).requests[0].prompt


def test_files_in_results_become_notes() -> None:
    """Agents send the files that their tools read, and send them again in every later request."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}
    file = {"type": "input_file", "file_id": "file_1"}
    given = [USER, CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "dot.png"}, image, file]}]
    note = "[A file was left out, because this model can only read text.]"
    assert messages(input=given)[-1]["content"] == f"dot.png\n{note}\n{note}"
    fields = ("image_url", "detail", "file_id")
    assert response(input=given).ignored == tuple(f"input[].output[].{field}" for field in fields)


def test_items_of_other_servers_are_named_as_ignored() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": "b"}
    assert messages(input=[USER, thought]) == [USER]
    assert response(input=[USER, thought]).ignored == ("input[].summary", "input[].encrypted_content")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([THOUGHT | {"content": None}], "input"),
        (5, "input"),
        (["Hi"], "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input"),
        ([{"type": "custom_tool_call", "call_id": "call_a", "name": "look"}], "input[0].input"),
        ([{"content": "Hi"}], "input[0].role"),
        ([{"role": "tool", "content": "Hi"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].image_url"),
        ([USER, {"role": "user", "content": [{"type": "input_text"}]}], "input[1].content[0].text"),
        ([{**THOUGHT, "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0]"),
        ([{**CALL, "name": ""}], "input[0].name"),
        ([{**CALL, "arguments": None}], "input[0].arguments"),
        ([{**CALL, "call_id": 5}], "input[0].call_id"),
        ([{**OUTPUT, "output": None}], "input[0].output"),
        ([{**OUTPUT, "output": 5}], "input[0].output"),
        ([{**OUTPUT, "call_id": 5}], "input[0].call_id"),
        ([{**OUTPUT, "output": [{"type": "input_audio"}]}], "input[0].output[0]"),
    ],
)
def test_invalid_input_is_refused_with_its_place(given: Any, param: str) -> None:
    refused(response, param, input=given)


def test_models_without_a_template_take_no_input() -> None:
    facts = structs.replace(FACTS, takes_chats=False)
    refused(lambda **fields: response(facts, **fields), "input", "unsupported_parameter")


def test_an_empty_list_is_an_empty_message() -> None:
    """Clients probe servers with such requests."""
    empty = {"role": "user", "content": ""}
    assert messages(input=[]) == messages(input="") == [empty]
    assert messages(input=[], instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, empty]


def test_items_without_text_are_no_conversation() -> None:
    message = refused(response, "input", input=[{"type": "web_search_call"}], instructions="Be brief.")
    assert "at least one message" in message


def test_items_of_tools_on_other_servers_are_left_out() -> None:
    others = ["web_search_call", "local_shell_call", "local_shell_call_output", "tool_search_call", "compaction"]
    found = response(input=[USER, *({"type": kind, "id": "x", "action": {"a": 1}} for kind in [*others, *others])])
    assert [*found.request.prompt.messages] == [USER]  # type: ignore[union-attr]
    assert found.ignored == tuple(f"input.{kind}" for kind in others)


def test_calls_of_custom_tools_and_of_namespaces_have_the_names_that_the_model_knows() -> None:
    called = {**CALL, "namespace": "files", "name": "read"}
    custom = {"type": "custom_tool_call", "call_id": "call_b", "name": "patch", "input": 'a "b"\n'}
    outputs = [OUTPUT, {"type": "custom_tool_call_output", "call_id": "call_b", "output": "done"}]
    answer, *results = messages(input=[called, custom, *outputs])
    functions = [call["function"] for call in answer["tool_calls"]]
    assert functions[0] == {"name": "files__read", "arguments": '{"a": 1}'}
    assert (functions[1]["name"], json.loads(functions[1]["arguments"])) == ("patch", {"input": 'a "b"\n'})
    assert [result["content"] for result in results] == ["found", "done"]


def test_any_text_is_accepted_as_arguments() -> None:
    for text in ('{"path": "a', "[1]", "x"):
        assert messages(input=[{**CALL, "arguments": text}])[0]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.push
@pytest.mark.parametrize(
    "item",
    [
        {"role": "system", "content": "x" * 1500},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 1500}]},
        {"role": "assistant", "content": "x" * 1500},  # all of which belong to the answer with the call
    ],
)
def test_many_items_take_linear_time(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    first = [call] if item.get("role") == "assistant" else []
    began = time.process_time()
    parse_response({"input": [*first, *[item] * 10_000]}, FACTS, SEED)
    assert time.process_time() - began < 2
