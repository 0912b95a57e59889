"""Tests of turning lines into calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.jobs.batching.requests import Asked, CallOptions, Default, Line, read_request

CHAT = "/v1/chat/completions"


def line(content: object, number: int = 7) -> Line:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Line(number, data, hashlib.sha256(data).digest())


def asked(content: object, options: CallOptions | None = None) -> Asked:
    return read_request(line(content), options or CallOptions())


def body_of(content: object, options: CallOptions | None = None) -> Mapping[str, Any]:
    return {name: value for name, value in asked(content, options).call.body.items() if name != "seed"}


def problem_of(content: object) -> LlmrunError:
    with pytest.raises(LlmrunError) as caught:
        asked(content)
    return caught.value


def openai_line(body: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {"custom_id": "mine", "method": "POST", "url": CHAT, "body": body, **others}


def test_a_line_of_openais_batches_is_a_call() -> None:
    found = asked(openai_line({"model": "gpt", "messages": [], "top_p": None, "seed": 5}))
    assert (found.custom_id, found.call.url, found.call.model) == ("mine", CHAT, "gpt")
    assert found.call.body == {"messages": [], "seed": 5}
    assert asked(openai_line({"prompt": "x"}, url="/v1/completions")).call.url == "/v1/completions"


def test_a_line_with_a_prompt_is_a_chat() -> None:
    assert asked({"prompt": "Hi"}).custom_id == "line-7"
    assert body_of({"prompt": "Hi", "max_tokens": 3, "custom_id": "x"}) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
    }
    with_system = body_of({"prompt": "Hi"}, CallOptions(system="Be brief."))
    assert with_system["messages"][0] == {"role": "system", "content": "Be brief."}
    messages = [{"role": "user", "content": "Hi"}]
    assert body_of({"messages": messages}, CallOptions(system="Be brief.")) == {"messages": messages}


def test_streams_are_left_out() -> None:
    assert body_of(openai_line({"stream": False, "stream_options": {"include_usage": True}, "n": 1})) == {"n": 1}


def test_a_template_gets_the_fields_of_a_line() -> None:
    options = CallOptions(fill=lambda fields: (" and ".join(map(str, fields.values())), "system"))
    body = body_of({"custom_id": "x", "a": "1", "b": 2}, options)
    assert [message["content"] for message in body["messages"]] == ["system", "x and 1 and 2"]


def test_the_fields_of_a_line_take_precedence() -> None:
    defaults = (Default(("max_tokens", "max_completion_tokens"), 9), Default(("top_k",), 4))
    options = CallOptions(defaults=defaults)
    assert body_of(openai_line({}), options) == {"max_tokens": 9, "top_k": 4}
    assert body_of(openai_line({"max_completion_tokens": 1}), options) == {"max_completion_tokens": 1, "top_k": 4}
    assert body_of(openai_line({"top_k": 0, "max_tokens": None}), options) == {"max_tokens": 9, "top_k": 0}


def test_equal_calls_have_equal_keys_and_seeds() -> None:
    one = asked(openai_line({"messages": [], "top_p": 0.5, "model": "a"})).call
    for other in (
        openai_line({"top_p": 0.5, "messages": []}, custom_id="other"),
        openai_line({"messages": [], "top_p": 0.5, "stop": None, "seed": -1}),
        {"messages": [], "top_p": 0.5},
    ):
        assert asked(other).call.key == one.key
        assert asked(other).call.body == one.body
    assert 0 <= one.body["seed"] < 1 << 31


def test_other_calls_have_other_keys_and_seeds() -> None:
    calls = [
        asked({"prompt": "a"}).call,
        asked({"prompt": "b"}).call,
        asked({"prompt": "a", "seed": 1}).call,
        asked({"prompt": "a"}, CallOptions(seed=1)).call,
        asked({"prompt": "a"}, CallOptions(defaults=(Default(("max_tokens",), 1),))).call,
    ]
    assert len({call.key for call in calls}) == len({call.body["seed"] for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON: Expecting property name enclosed in double quotes: column 2"),
        (b"\xff{}", "not UTF-8 text"),
        (b"[1]", "not a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "occurs twice"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        ({}, "must have exactly one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "must have exactly one of prompt and messages"),
        ({"prompt": 5}, "prompt: expected a string"),
        ({"prompt": "a", "custom_id": 5}, "custom_id: expected a string"),
        ({"prompt": "a", "custom_id": ""}, "custom_id: expected 1 to 512 characters"),
        ({"body": {}, "method": "POST", "url": CHAT}, "custom_id: this field is required"),
        (openai_line({}, method="GET"), "method: expected POST"),
        (openai_line({}, url="/v1/embeddings"), "url: expected one of"),
        ({"custom_id": "x", "body": {}}, "url: this field is required"),
        ({"custom_id": "x", "url": CHAT, "body": "text"}, "body: expected an object"),
        (openai_line({"stream": True}), "stream: not supported in a batch"),
        (openai_line({}, max_tokens=5), "max_tokens: unknown field next to body; move the field into the body"),
    ],
)
def test_a_line_that_is_no_request_says_why(content: object, words: str) -> None:
    problem = problem_of(content)
    assert words in f"{problem}; {problem.hint}"


def test_a_line_of_text_is_a_prompt() -> None:
    text = CallOptions(text=True, system="S")
    assert body_of(b'{"prompt": "x"}', text)["messages"][1] == {"role": "user", "content": '{"prompt": "x"}'}
    assert asked("Größe".encode(), text).custom_id == "line-7"
    with pytest.raises(LlmrunError, match="not UTF-8 text: invalid byte at 1"):
        asked(b"a\xff", text)
    filled = CallOptions(text=True, fill=lambda fields: (f"Sum: {fields['input']}", None))
    assert body_of(b"a text", filled)["messages"] == [{"role": "user", "content": "Sum: a text"}]
    assert text.as_json() != CallOptions(system="S").as_json()
