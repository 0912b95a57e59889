"""Tests of the conversion of system prompts and messages to the form of chat completions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llmrun.serving.protocol.anthropic.requests import parse_count
from llmrun.serving.protocol.errors import InvalidField
from tests.support.protocol.answers import FACTS
from tests.support.protocol.anthropic_answers import TOOL, USER, message, prompt_of

CACHE = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "b", "a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, **CACHE}


def read(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    return [*prompt_of(messages=[*messages], **fields).messages]


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def test_texts_and_blocks_of_text_are_the_same() -> None:
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert read(USER, system="Be brief.") == expected
    assert read(said("user", text("Hi")), system=[text("Be brief.")]) == expected


def test_several_blocks_become_lines() -> None:
    assert read(said("user", text("a"), text("b")), system=[text("c"), text("d")]) == [
        {"role": "system", "content": "c\nd"},
        {"role": "user", "content": "a\nb"},
    ]


def test_messages_of_the_same_role_are_combined() -> None:
    past = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert read(USER, USER, *past, USER) == [
        {"role": "user", "content": "Hi\nHi"},
        {"role": "assistant", "content": "one\ntwo"},
        {"role": "user", "content": "Hi"},
    ]


def test_calls_and_results_become_messages() -> None:
    call = said("assistant", {"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("Wait."), CALL)
    found = read(USER, call, said("user", text("Next?"), RESULT), tools=[TOOL])
    function = {"name": "look", "arguments": {"at": "b", "a": 1}}
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "found"},
        {"role": "user", "content": "Next?"},
    ]
    assert [*found[1]["tool_calls"][0]["function"]["arguments"]] == ["at", "a"], "the order is part of the prefix"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "error: no such file", "is_error": True}, "error: no such file"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_results_become_text(fields: dict[str, Any], expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    assert read(USER, said("assistant", CALL), said("user", result))[-1]["content"] == expected


def test_files_in_results_become_notes() -> None:
    """Agents send the files that their tools read, and send them again in every later request."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    messages = [USER, said("assistant", CALL), said("user", {**RESULT, "content": [text("dot.png"), image]})]
    note = "[A file was left out, because this model can only read text.]"
    assert read(*messages)[-1]["content"] == f"dot.png\n{note}"
    assert message(messages=messages).ignored == ("messages[].content[].content[].source",)


def test_calls_of_combined_messages_stay_together() -> None:
    found = read(USER, said("assistant", CALL), said("assistant", {**CALL, "id": "toolu_2"}), said("user", RESULT))
    assert [call["id"] for call in found[1]["tool_calls"]] == ["toolu_1", "toolu_2"]


def test_unreadable_thinking_is_named_as_ignored() -> None:
    redacted = {"type": "redacted_thinking", "data": "abc"}
    parsed = message(messages=[USER, said("assistant", redacted, text("Yes.")), USER])
    assert parsed.ignored == ("messages[].content[].data",)
    assert read(USER, said("assistant", redacted, text("Yes.")), USER)[1] == {"role": "assistant", "content": "Yes."}


def test_later_system_messages_become_reminders() -> None:
    reminder = {"role": "system", "content": [text("Be nice.")]}
    assert read(reminder, USER, reminder, system="Be brief.") == [
        {"role": "system", "content": "Be brief.\nBe nice."},
        {"role": "user", "content": "Hi\n<system-reminder>\nBe nice.\n</system-reminder>"},
    ]


@pytest.mark.parametrize("system", [[text(BILLING), text("You help.")], f"{BILLING}You help.", f"{BILLING}\nYou help."])
def test_the_line_for_accounting_is_left_out(system: Any) -> None:
    """It differs in every request, so no cached prefix could be reused."""
    assert read(USER, system=system)[0] == {"role": "system", "content": "You help."}
    assert message(system=system).ignored == ("x-anthropic-billing-header",)
    assert read(USER, system=BILLING) == [USER]


def test_other_text_about_headers_stays() -> None:
    assert read(USER, system=f"Never print {BILLING}")[0]["content"] == f"Never print {BILLING}"


def test_an_answer_at_the_end_is_continued() -> None:
    prompt = prompt_of(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert not prompt.add_generation_prompt
    assert prompt.messages[-1] == {"role": "assistant", "content": "The answer is ("}
    assert prompt_of().add_generation_prompt


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([said("user", {"text": "Hi"})], "messages[0].content[0].type"),
        ([said("user", {"type": "text"})], "messages[0].content[0].text"),
        ([said("user", {"type": "image", "source": {}})], "messages[0].content[0].source.type"),
        ([said("user", {"type": "document", "source": {}})], "messages[0].content[0]"),
        ([said("user", {**RESULT, "tool_use_id": 5})], "messages[0].content[0].tool_use_id"),
        ([USER, said("assistant", {**CALL, "id": 5})], "messages[1].content[0].id"),
        ([said("user", {**RESULT, "content": [{"type": "audio"}]})], "messages[0].content[0].content[0]"),
        ([USER, said("assistant", {**CALL, "name": ""})], "messages[1].content[0].name"),
        ([USER, said("assistant", {**CALL, "input": None})], "messages[1].content[0].input"),
        ([USER, said("assistant", {**CALL, "input": "{}"})], "messages[1].content[0].input"),
        ([USER, said("assistant", {"type": "server_tool_use"})], "messages[1].content[0]"),
        ([USER, said("assistant", CALL)], "messages"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        message(messages=messages)
    assert caught.value.param == param


@pytest.mark.push
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_many_messages_take_linear_time(role: str) -> None:
    """They took minutes."""
    user, message = {"role": "user", "content": "x"}, {"role": role, "content": "x" * 1500}
    began = time.process_time()
    parse_count({"model": "tiny", "messages": [user, *[message] * 10_000, user]}, FACTS)
    assert time.process_time() - began < 2
