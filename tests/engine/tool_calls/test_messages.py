"""Tests of converting past messages with tool calls into what a template needs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.templates.tool_format import ToolAbilities
from llmrun.engine.tool_calls.prompting import require_tools, template_messages
from tests.support.templates.template_runs import PROCESS
from tests.support.tool_calls.formats import WITH_FORMATS, source_of, tools_of

HERMES = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
USER = {"role": "user", "content": "Hi"}
PLACE = {"type": "string", "description": "Where"}
PARAMETERS = {"type": "object", "properties": {"place": PLACE}, "required": []}
TOOL = {"type": "function", "function": {"name": "get", "description": "Gets", "parameters": PARAMETERS}}


def call(arguments: object = '{"place": "Ulm"}', call_id: object = "call_1", name: object = "get") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*calls: object, content: object = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def result(call_id: object = "call_1", content: object = "21 °C") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_arguments_become_objects() -> None:
    message = template_messages([USER, said(call())], tools_of(HERMES))[1]
    assert message["tool_calls"][0]["function"] == {"name": "get", "arguments": {"place": "Ulm"}}
    same = template_messages([USER, said(call({"place": "Ulm"}))], tools_of(HERMES))[1]
    assert same == message


def test_arguments_become_text_for_templates_that_need_it() -> None:
    message = template_messages([said(call({"place": "Ulm"}))], replace(tools_of(HERMES), arguments_as_text=True))[0]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"place": "Ulm"}


@pytest.mark.parametrize("empty", [None, ""])
def test_no_arguments_are_an_empty_object(empty: object) -> None:
    assert template_messages([said(call(empty))], tools_of(HERMES))[0]["tool_calls"][0]["function"]["arguments"] == {}


NO_OBJECTS = ['{"place": "Ul', "{", "[1]", '"place"', "null", "Ulm", "[" * 100_000]


@pytest.mark.parametrize("text", NO_OBJECTS)
def test_arguments_that_are_no_object_are_kept(text: str) -> None:
    """Clients can send back a call that was cut off by the token limit."""
    messages = [USER, said(call(text)), result()]
    for as_text, expected in ((True, text), (False, {"arguments": text})):
        found = template_messages(messages, replace(tools_of(HERMES), arguments_as_text=as_text))
        assert found[1]["tool_calls"][0]["function"]["arguments"] == expected
        assert found[2]["name"] == "get"


def test_arguments_that_are_no_object_become_text_where_the_template_drops_calls() -> None:
    message = template_messages([said(call('{"place": "Ul'))], tools_of("LFM2-8B-A1B"))[0]
    written = """get(arguments='{"place": "Ul')"""
    assert message["content"] == f"<|tool_call_start|>[{written}]<|tool_call_end|>"


def test_results_get_the_name_of_their_tool() -> None:
    messages = [said(call(), call(call_id="call_2", name="now")), result("call_2"), result()]
    assert [each.get("name") for each in template_messages(messages, tools_of(HERMES))] == [None, "now", "get"]


def test_a_lone_result_belongs_to_the_lone_call() -> None:
    lone = {"role": "tool", "content": [{"type": "text", "text": "21"}]}
    assert template_messages([said(call()), lone], tools_of(HERMES))[1] == {
        "role": "tool",
        "content": "21",
        "tool_call_id": "call_1",
        "name": "get",
    }


MISSING = object()


def with_id(message: dict[str, Any], field: str, call_id: object) -> dict[str, Any]:
    """Return a message or call with an ID, or without the field."""
    return {
        **{name: value for name, value in message.items() if name != field},
        **({} if call_id is MISSING else {field: call_id}),
    }


@pytest.mark.parametrize("of_calls", ["", None, MISSING])
@pytest.mark.parametrize("of_results", ["", None, MISSING])
@pytest.mark.parametrize(
    "template", [HERMES, "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"]
)
def test_calls_and_results_without_ids_belong_together_in_order(
    of_calls: object, of_results: object, template: str
) -> None:
    calls = [with_id(call(name=name), "id", of_calls) for name in ("get", "now", "get")]
    results = [with_id(result(content=text), "tool_call_id", of_results) for text in ("1", "2", "3")]
    found = template_messages(
        [USER, said(*calls[:2]), *results[:2], said(calls[2]), results[2], USER], tools_of(template)
    )
    named = [(one["name"], one["content"]) for one in found if one["role"] == "tool"]
    assert named == [("get", "1"), ("now", "2"), ("get", "3")]
    ids = [each["id"] for one in found for each in one.get("tool_calls", ())]
    assert ids == [one["tool_call_id"] for one in found if one["role"] == "tool"]
    assert len({*ids}) == 3
    assert all(ids)


def test_results_without_ids_are_found_by_their_tool() -> None:
    results = [{"role": "tool", "name": "now", "content": "1"}, {"role": "tool", "name": "get", "content": "2"}]
    found = template_messages([said(call(call_id="a"), call(call_id="b", name="now")), *results], tools_of(HERMES))
    assert [one["tool_call_id"] for one in found[1:]] == ["b", "a"]


def test_one_side_may_have_ids() -> None:
    calls = [with_id(call(), "id", ""), with_id(call(name="now"), "id", "")]
    found = template_messages([said(*calls), result("x", "1"), result("y", "2")], tools_of(HERMES))
    assert [one["name"] for one in found[1:]] == ["get", "now"]
    found = template_messages(
        [said(call(call_id="x"), call(call_id="y", name="now")), result(""), result("")], tools_of(HERMES)
    )
    assert [(one["tool_call_id"], one["name"]) for one in found[1:]] == [("x", "get"), ("y", "now")]


def test_calls_with_equal_ids_are_told_apart() -> None:
    messages = [
        said(call(), call(name="now")),
        result(content="1"),
        result(content="2"),
        said(call()),
        result(content="3"),
    ]
    found = template_messages(messages, tools_of(HERMES))
    assert [one["name"] for one in found if one["role"] == "tool"] == ["get", "now", "get"]
    ids = [each["id"] for one in found for each in one.get("tool_calls", ())]
    assert ids == [one["tool_call_id"] for one in found if one["role"] == "tool"]
    assert ids[0] != ids[1]


def test_many_calls_without_ids_take_little_time() -> None:
    calls = [with_id(call(name=f"get_{number}"), "id", "") for number in range(20_000)]
    results = [{"role": "tool", "name": "other", "content": ""} for _ in calls]
    assert len(template_messages([said(*calls), *results], tools_of(HERMES))) == 20_001


def test_missing_content_is_what_the_template_accepts() -> None:
    for null, content in ((True, None), (False, "")):
        for given_ in (None, ""):
            message = template_messages([said(call(), content=given_)], replace(tools_of(HERMES), null_content=null))[0]
            assert message["content"] == content
    assert template_messages([said(call(), content="Look.")], tools_of(HERMES))[0]["content"] == "Look."


def test_ids_are_shortened_for_mistral() -> None:
    mistral = tools_of("mistralai-Mistral-Nemo-Instruct-2407")
    messages = template_messages(
        [said(call(call_id="call_0123456789abcdef")), result("call_0123456789abcdef")], mistral
    )
    short = messages[0]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert messages[1]["tool_call_id"] == short
    assert template_messages([said(call(call_id="abcdefgh1"))], mistral)[0]["tool_calls"][0]["id"] == "abcdefgh1"


def test_calls_become_text_where_the_template_drops_them() -> None:
    message = template_messages([said(call(), content="Look. ")], tools_of("LFM2-8B-A1B"))[0]
    assert message == {"role": "assistant", "content": "Look. <|tool_call_start|>[get(place='Ulm')]<|tool_call_end|>"}


def test_ids_are_made_in_linear_time() -> None:
    n = 20_000
    named = [call(call_id=f"call_{number}") for number in range(n, 2 * n)]
    messages = template_messages([said(*named, *([call(call_id="")] * n))], tools_of(HERMES))
    assert len({each["id"] for each in messages[0]["tool_calls"]}) == 2 * n


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([said(call(5))], "the arguments of get are not a JSON object"),
        ([said(call([1]))], "the arguments of get are not a JSON object"),
        ([said(5)], "number 1 has no function with a name"),
        ([said(call(), call(name=None))], "number 2 has no function with a name"),
        ([{"role": "assistant", "tool_calls": "x"}], "not a list"),
        ([result()], "tool result without a call: call_1"),
        ([said(call()), result("a\nb")], r"tool result without a call: a\nb"),
        ([{"role": "tool", "content": ""}], "without tool_call_id"),
        ([{"role": "tool", "name": "look", "content": ""}], "tool result without a call: look"),
    ],
)
def test_invalid_messages_are_refused_in_one_line(messages: list[Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        template_messages(messages, tools_of(HERMES))
    assert words in str(refused.value)
    assert str(refused.value).isprintable()


def test_templates_without_tools_refuse_them() -> None:
    for messages in ([said(call())], [result()]):
        with pytest.raises(UsageError, match="this model's chat template does not support tools"):
            template_messages(messages, ToolAbilities())
    with pytest.raises(UsageError, match="tools cannot be used"):
        require_tools(ToolAbilities())
    with pytest.raises(UsageError, match="format of this model's tool calls is unknown"):
        require_tools(ToolAbilities(takes_tools=True))
    require_tools(tools_of(HERMES))


def test_calls_are_split_where_the_template_allows_one_per_message() -> None:
    both = {**said(call(call_id="a"), call(call_id="b")), "content": "Let me see."}
    messages = [USER, both, result("b", "second"), result("a", "first"), USER]
    found = template_messages(messages, tools_of("meta-llama-Llama-3.1-8B-Instruct"))
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [len(one["tool_calls"]) for one in found if one["role"] == "assistant"] == [1, 1]
    assert [one["content"] or "" for one in found[1:5]] == ["Let me see.", "first", "", "second"]


def test_other_messages_stay_as_they_are() -> None:
    messages = [USER, {"role": "assistant", "content": "Hi", "tool_calls": []}, "odd", None]
    assert template_messages(messages, ToolAbilities()) == messages


@pytest.mark.push
@pytest.mark.parametrize("name", WITH_FORMATS)
def test_real_templates_render_converted_conversations(name: str) -> None:
    text = rendered(name, '{"place": "Ulm"}')
    assert "It is 21 °C." in text
    assert "Ulm" in text


@pytest.mark.push
@pytest.mark.parametrize("name", WITH_FORMATS)
def test_real_templates_render_calls_that_were_cut_off(name: str) -> None:
    for arguments in ('{"place": "Ulm', "Ulm"):
        text = rendered(name, arguments)
        assert "It is 21 °C." in text
        assert "Ulm" in text


def rendered(name: str, arguments: str) -> str:
    """Return the text that a template writes for a conversation with one call and its result."""
    abilities = tools_of(name)
    answer = {"role": "assistant", "content": "Warm."}
    asked = said(call(arguments, call_id="call_0123456789"))
    messages = [USER, asked, result("call_0123456789", "It is 21 °C."), answer, USER]
    return PROCESS.render(
        source_of(name),
        name,
        {
            "bos_token": "",
            "eos_token": "",
            "tools": [TOOL] if abilities.takes_tools else None,
            "add_generation_prompt": True,
            "messages": template_messages(messages, abilities),
        },
    )


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "id", "tool_call_id"]),
            st.one_of(inner, st.sampled_from(["assistant", "tool", "{}", '{"a": 1}', "call_1"])),
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@pytest.mark.push
@given(st.lists(ANYTHING, max_size=4), st.sampled_from([HERMES, "LFM2-8B-A1B", ""]))
def test_odd_messages_are_converted_or_refused(messages: list[Any], template: str) -> None:
    abilities = tools_of(template) if template else ToolAbilities()
    refusal = ""
    try:
        assert len(template_messages(messages, abilities)) == len(messages)
    except LlmrunError as error:
        refusal = str(error)
    assert refusal.isprintable()
