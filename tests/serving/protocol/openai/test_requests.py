"""Tests of the conversion of request bodies as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import ContextExceeded
from llmrun.engine.requests import ChatPrompt, FillPrompt, Request, TextPrompt, TokenPrompt, check_request
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai.options import choice_seed
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import FACTS, TOOL, USER, chat, completion
from tests.support.protocol.refusals import refused


def prompt_of(parsed: ParsedCompletion) -> ChatPrompt:
    prompt = parsed.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize("prompt", [[1] * FACTS.info.context_size, ["a", [1] * FACTS.info.context_size]])
def test_tokens_that_cannot_fit_are_refused_early(prompt: Any) -> None:
    with pytest.raises(ContextExceeded, match="prompt does not fit in the context"):
        completion(prompt=prompt)
    completion(prompt=[1] * (FACTS.info.context_size - 1))


def test_the_smallest_chat_uses_the_defaults() -> None:
    parsed = chat()
    (request,) = parsed.requests
    assert request == Request(ChatPrompt((USER,)), sampling=replace(FACTS.default_sampling, seed=parsed.seed))
    assert (parsed.stream, parsed.include_usage, parsed.ignored, ignored_names(parsed.ignored)) == (
        False,
        False,
        (),
        "",
    )


def test_each_choice_has_its_own_seed() -> None:
    parsed = chat(n=3, seed=7)
    assert [request.seed for request in parsed.requests] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    first, *others = [structs.replace(request, sampling=FACTS.default_sampling) for request in parsed.requests]
    assert others == [first, first]


def test_choices_are_ordered_by_prompt() -> None:
    parsed = completion(prompt=["a", "b"], n=2, seed=7)
    prompts = [request.prompt for request in parsed.requests]
    assert prompts == [TextPrompt("a"), TextPrompt("a"), TextPrompt("b"), TextPrompt("b")]
    assert [request.seed for request in parsed.requests] == [7, choice_seed(7, 1)] * 2


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [TextPrompt("a")]),
        ("", [TextPrompt("")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
        (["a", [1]], [TextPrompt("a"), TokenPrompt((1,))]),
    ],
)
def test_prompts_may_be_texts_or_tokens(given: Any, prompts: list[Any]) -> None:
    assert [request.prompt for request in completion(prompt=given).requests] == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (1, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[]], "prompt[0]"),
        ([["a"]], "prompt[0][0]"),
        (["a", None], "prompt[1]"),
        ([999, 1000], "prompt[1]"),
        ([[-1]], "prompt[0][0]"),
        (["a"] * 129, "prompt"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Any, param: str) -> None:
    refused(completion, param, prompt=prompt)


def test_a_model_without_a_template_refuses_chats() -> None:
    facts = structs.replace(FACTS, takes_chats=False)
    refused(lambda: chat(facts), "messages", "unsupported_parameter")
    assert completion(facts).requests


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"top_logprobs": 0}, None),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).requests[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ],
)
def test_invalid_chat_logprobs_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(chat, param, **fields)


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=0).requests[0].logprobs == 0
    assert completion(logprobs=5).requests[0].logprobs == 5
    refused(completion, "logprobs", "invalid_type", logprobs=True)


def test_the_last_answer_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Hel"}]
    assert prompt_of(chat(messages=messages)).add_generation_prompt
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert not prompt_of(chat(messages=messages, **fields)).add_generation_prompt
    refused(chat, "continue_final_message", continue_final_message=True)
    refused(chat, "continue_final_message", messages=messages, tools=[TOOL], continue_final_message=True)
    refused(chat, "add_generation_prompt", messages=messages, add_generation_prompt=False)
    refused(chat, "add_generation_prompt", messages=messages, **{**fields, "add_generation_prompt": True})


@pytest.mark.parametrize("logprobs", [None, 0, 1, 20])
def test_every_prompt_can_be_repeated(logprobs: int | None) -> None:
    fields: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
    requests = completion(prompt=["a", [1, 2]], n=2, echo=True, **fields).requests
    assert [(request.echo, request.logprobs) for request in requests] == [(True, logprobs)] * 4
    assert not completion(prompt="a", **fields).requests[0].echo


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_completion_may_consist_of_the_prompt(name: str) -> None:
    assert completion(**{name: 0}).requests[0].max_tokens == 0
    assert completion(**{name: -1}).requests[0].max_tokens is None
    refused(completion, name, **{name: -2})
    if name == "n_predict":  # editors for llama-server prepare the cache with chats of this form
        assert chat(n_predict=0, samplers=[]).requests[0].max_tokens == 0
    else:
        refused(chat, name, **{name: 0})


def test_best_of_must_equal_n() -> None:
    assert completion(best_of=1).n == 1
    assert completion(best_of=2, n=2).n == 2
    refused(completion, "best_of", "unsupported_parameter", best_of=2)


def test_unknown_fields_are_named() -> None:
    parsed = chat(
        cache_prompt=True,
        id_slot=None,
        store=True,
        service_tier="flex",
        stream_options={"include_usage": True, "include_obfuscation": True},
        messages=[USER, {**USER, "id": 1}, {**USER, "id": 2, "content": [{"type": "text", "text": "a", "x": 1}]}],
    )
    assert {*parsed.ignored} == {
        "cache_prompt",
        "store",
        "service_tier",
        "stream_options.include_obfuscation",
        "messages[].id",
        "messages[].content[].x",
    }
    assert completion(messages=[USER], reasoning_effort="low").ignored == ("messages", "reasoning_effort")


def test_fields_that_never_matter_are_not_named() -> None:
    quiet = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    assert chat(**quiet, safety_identifier="x", stream_options={"include_obfuscation": False}).ignored == ()


def test_the_header_of_ignored_names_is_short() -> None:
    """Proxies and clients have limits of 4 to 8 KB for a header."""
    assert len(ignored_names(chat(**{"\U0001f600" * 60 + str(number): 1 for number in range(40)}).ignored)) < 2_500


def test_the_header_of_ignored_names_is_safe() -> None:
    header = ignored_names(chat(**{"a\r\nset-cookie: x": 1, "é\u2028": 1, "z" * 500: 1}).ignored)
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 300
    many = ignored_names(chat(**{f"field{number}": 1 for number in range(1000)}).ignored)
    assert many.endswith("field31, and 968 more")


@pytest.mark.parametrize(("name", "shown"), [("", "''"), (" ", "''"), (" a ", "a")])
def test_the_header_of_ignored_names_never_ends_in_a_space(name: str, shown: str) -> None:
    """HTTP forbids it, so the connection would break off."""
    assert ignored_names(chat(**{"invented": 1, name: 1}).ignored) == f"invented, {shown}"


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("functions", [{"name": "f"}], []),
        ("function_call", "auto", "none"),
        ("audio", {}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("web_search_options", {}, None),
        ("moderation", {}, None),
        ("min_tokens", 5, 0),
        ("use_beam_search", True, False),
    ],
)
def test_fields_that_cannot_be_honored_are_refused(name: str, value: Any, harmless: Any) -> None:
    refused(chat, name, "unsupported_parameter", **{name: value})
    assert chat(**{name: harmless}).ignored == ()


def test_a_verbosity_without_effect_is_named() -> None:
    assert chat(verbosity="low").ignored == ("verbosity",)
    assert chat(verbosity="medium").ignored == ()


def test_a_suffix_asks_to_fill_the_gap() -> None:
    parsed = completion(prompt=["a", "b"], n=2, suffix="z")
    prompts = [request.prompt for request in parsed.requests]
    assert prompts == [FillPrompt("a", "z")] * 2 + [FillPrompt("b", "z")] * 2
    assert [request.prompt for request in completion(suffix="").requests] == [TextPrompt("Hi")]


@pytest.mark.parametrize(
    ("param", "fields"), [("suffix", {"prompt": [1, 2]}), ("suffix", {"prompt": ["a", [1]]}), ("echo", {"echo": True})]
)
def test_only_texts_without_echo_have_a_suffix(param: str, fields: dict[str, Any]) -> None:
    refused(completion, param, "unsupported_parameter", suffix="x", **fields)


def test_a_model_that_cannot_fill_refuses_a_suffix() -> None:
    with pytest.raises(InvalidField, match="this model cannot fill in the middle") as caught:
        completion(structs.replace(FACTS, fills=False), suffix="x")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")


def test_the_engine_accepts_what_is_parsed() -> None:
    parsed = chat(
        n=2, seed=2**64 - 1, temperature=0, top_k=-1, stop=["a"], logit_bias={"5": -100, "6": 3.5}, logprobs=True
    )
    for request in (*parsed.requests, *completion(prompt=[[1, 999]]).requests):
        check_request(request, FACTS.info.vocabulary_size)
