"""Tests of how requests of Ollama's API become requests for the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind
from llmrun.engine.requests import ChatPrompt, FillPrompt, Request, TextPrompt
from llmrun.engine.tool_calls.prompting import template_messages
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.ollama.requests import keep_alive_of, only_unloads_chat, only_unloads_generate
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from tests.support.protocol.answers import FACTS, SEED, TOOL, USER
from tests.support.protocol.ollama import chat, generate
from tests.support.protocol.refusals import refused
from tests.support.tool_calls.formats import tools_of

PLAIN = structs.replace(FACTS, takes_tools=False, thinks=False)
BASE = structs.replace(PLAIN, takes_chats=False)
CALL = {"function": {"name": "look", "arguments": {"at": "sky"}}}
BOTH = pytest.mark.parametrize("parse", [chat, generate])


def only(parsed: ParsedCompletion) -> Request:
    (request,) = parsed.requests
    return request


def prompt(**fields: Any) -> ChatPrompt:
    found = only(chat(**fields)).prompt
    assert isinstance(found, ChatPrompt)
    return found


@BOTH
def test_requests_stream_by_default(parse: Callable[..., ParsedCompletion]) -> None:
    parsed = parse()
    assert (parsed.stream, parsed.n, parsed.seed, parsed.ignored) == (True, 1, SEED, ())
    assert only(parsed).sampling == replace(FACTS.default_sampling, seed=SEED)
    assert not parse(stream=False).stream


@BOTH
def test_options_are_those_of_the_engine(parse: Callable[..., ParsedCompletion]) -> None:
    options: dict[str, Any] = {
        "temperature": 0,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repeat_penalty": 1.1,
        "repeat_last_n": 33,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "mirostat": 1,
        "mirostat_tau": 0.8,
        "mirostat_eta": 0.6,
        "seed": 42,
    }
    parsed = parse(options={**options, "num_predict": 100, "stop": ["\n", "user:"]})
    request = only(parsed)
    assert request.sampling == SamplingParams(**options)
    assert (request.max_tokens, request.stop, parsed.ignored) == (100, ("\n", "user:"), ())


@BOTH
def test_options_of_the_server_are_named_as_ignored(parse: Callable[..., ParsedCompletion]) -> None:
    options = {"num_ctx": 1024, "num_keep": 5, "num_gpu": 1, "num_thread": 8, "use_mmap": True, "tfs_z": 0.5}
    assert parse(options=options).ignored == tuple(f"options.{name}" for name in options)
    assert parse(options={"num_ctx": FACTS.info.context_size}).ignored == ()


@BOTH
@pytest.mark.parametrize("wanted", [4097, 8192, 131072, 8192.0])
def test_clients_that_want_a_larger_context_learn_the_available_one(
    parse: Callable[..., ParsedCompletion], wanted: float
) -> None:
    parsed = parse(options={"num_ctx": wanted, "num_gpu": 1})
    assert (parsed.context, parsed.ignored) == (4096, ("options.num_ctx", "options.num_gpu"))


@BOTH
@pytest.mark.parametrize("wanted", [4096, 4096.0, 0, -1, None])
def test_other_contexts_are_not_mentioned(parse: Callable[..., ParsedCompletion], wanted: float | None) -> None:
    """A value of 0 means the default context size, as it does in Ollama."""
    parsed = parse(options={"num_ctx": wanted})
    assert (parsed.context, parsed.ignored) == (0, ())
    assert parse(options={"num_ctx": 1024}).context == 0


@pytest.mark.parametrize("options", [None, {}, {"temperature": None, "stop": None}])
def test_options_may_be_empty(options: object) -> None:
    assert chat(options=options).ignored == generate(options=options).ignored == ()


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    """Home Assistant sends its numbers like this."""
    parsed = chat(options={"num_ctx": 4096.0, "top_k": 7.0, "num_predict": 5.0})
    assert (only(parsed).sampling.top_k, only(parsed).max_tokens, parsed.ignored) == (7, 5, ())


@pytest.mark.parametrize(("limit", "tokens"), [(-1, None), (-2, None), (1, 1)])
def test_negative_limits_mean_no_limit(limit: int, tokens: int | None) -> None:
    assert only(chat(options={"num_predict": limit})).max_tokens == tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_predict": 0}, "options.num_predict"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"num_ctx": 0.5}, "options.num_ctx"),
        ({"num_ctx": "big"}, "options.num_ctx"),
        ({"num_ctx": 2**31}, "options.num_ctx"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"stop": [""]}, "options.stop[0]"),
        ({"seed": "x"}, "options.seed"),
        ({"logit_bias": {"x": 1}}, "options.logit_bias"),
        ({"samplers": ["x"]}, "options.samplers"),
    ],
)
def test_errors_name_the_option(options: dict[str, Any], param: str) -> None:
    refused(chat, param, None, options=options)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((0, 0), (300, 300), (0.5, 0.5), (-1, math.inf), ("-1", math.inf), ("-1s", math.inf)),
        *((-0.5, math.inf), ("-5m", math.inf), ("-1h30m0s", math.inf), ("+5m", 300), (".5h", 1800), ("1.h", 3600)),
        *(("0", 0), ("10", 10), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), ("0s", 0)),
        *(("24h", 86400), ("5m0s", 300), ("1h30m0s", 5400), ("1µs", 1e-6), ("1μs", 1e-6), ("1us", 1e-6), ("1ns", 1e-9)),
        ("2562047h47m16.854775807s", 9223372036.854776),  # Go's longest duration
    ],
)
def test_keep_alive_is_a_duration(value: float | str, seconds: float) -> None:
    assert keep_alive_of({"keep_alive": value}) == seconds
    assert chat(keep_alive=value).ignored == ()


@pytest.mark.parametrize("value", ["", "5 minutes", "m", "5m5", "1y", ".", "+-5m", True, [], 10**400, "1" * 100])
def test_other_durations_are_refused(value: object) -> None:
    refused(chat, "keep_alive", None, keep_alive=value)


def test_messages_have_the_form_of_the_engine() -> None:
    messages = [
        {"role": "System", "content": "Be brief."},
        USER,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_name": "look", "content": "blue"},
        {"role": "tool", "content": "grey"},
        {"role": "assistant", "content": "Blue."},
    ]
    call = {"type": "function", **CALL}
    assert [*prompt(messages=messages).messages] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "blue", "name": "look"},
        {"role": "tool", "content": "grey"},
        {"role": "assistant", "content": "Blue."},
    ]


def test_calls_and_results_keep_their_ids() -> None:
    """Our own answers contain an ID and the index of each call."""
    sent = {"id": "call_abc", "function": {"index": 0, **CALL["function"]}}
    parsed = chat(messages=[{"role": "assistant", "tool_calls": [sent]}, {"role": "tool", "tool_call_id": "call_abc"}])
    found = only(parsed).prompt
    assert isinstance(found, ChatPrompt)
    assert found.messages[0]["tool_calls"][0]["id"] == found.messages[1]["tool_call_id"] == "call_abc"
    assert parsed.ignored == ()


def test_results_belong_to_the_first_open_call_of_their_tool() -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("b", "a", "a")]
    abilities = tools_of("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use")
    messages = prompt(messages=[USER, {"role": "assistant", "tool_calls": calls}, *results]).messages
    found = template_messages(messages, abilities)
    first, second, third = (call["id"] for call in found[1]["tool_calls"])
    assert [message["tool_call_id"] for message in found[2:]] == [second, first, third]
    alone = prompt(messages=[{"role": "tool", "tool_name": "a", "content": ""}]).messages
    with pytest.raises(UsageError, match="tool result without a call: a"):
        template_messages(alone, abilities)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "What is this?", "images": ["aGk="]}, "messages[0].images[0]"),
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "control", "content": "thinking"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "assistant", "thinking": 5}, "messages[0].thinking"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_errors_name_the_place_in_a_message(message: dict[str, Any], param: str) -> None:
    refused(chat, param, None, messages=[message])


def test_unknown_fields_are_named_as_ignored() -> None:
    message = {**USER, "images": [], "thinking": "?", "invented": 1}
    assert {*chat(messages=[message], truncate=False, shift=True, width=5).ignored} == {
        "messages[].thinking",
        "messages[].invented",
        "shift",
        "width",
    }


def test_a_last_answer_is_continued() -> None:
    answer = {"role": "assistant", "content": "The sky is"}
    found = prompt(messages=[USER, answer])
    assert (found.add_generation_prompt, [*found.messages]) == (False, [USER, answer])
    assert prompt(messages=[USER, answer, USER]).add_generation_prompt
    assert not prompt(messages=[USER, {**answer, "thinking": "Hm."}], think=False).add_generation_prompt


def test_answers_are_not_continued_with_tools() -> None:
    answer = {"role": "assistant", "content": "The sky is"}
    assert prompt(messages=[USER, answer], tools=[TOOL]).add_generation_prompt


@pytest.mark.parametrize("answer", [{}, {"content": ""}, {"content": None, "tool_calls": []}])
def test_empty_last_answers_are_left_out(answer: dict[str, Any]) -> None:
    """To continue an empty answer, the model begins a new answer."""
    found = prompt(messages=[USER, {"role": "assistant", **answer}])
    assert (found.add_generation_prompt, [*found.messages]) == (True, [USER])
    assert len(prompt(messages=[USER, {"role": "assistant", "tool_calls": [CALL]}]).messages) == 2


def test_tools_reach_the_template() -> None:
    found = prompt(tools=[TOOL, {"function": {"name": "other"}}])
    assert [tool["function"]["name"] for tool in found.tools or ()] == ["look", "other"]
    refused(partial(chat, PLAIN), "tools", None, tools=[TOOL])


@BOTH
def test_thinking_is_on_off_or_a_level(parse: Callable[..., ParsedCompletion]) -> None:
    assert [only(parse(think=think)).think for think in (None, True, False, "low", "max")] == [
        None,
        True,
        False,
        True,
        True,
    ]
    leveled = only(parse(think="high")).prompt
    assert isinstance(leveled, ChatPrompt)
    assert leveled.template_kwargs == {"reasoning_effort": "high"}
    refused(parse, "think", None, think="very")
    refused(parse, "think", None, think=1)


@BOTH
def test_models_that_do_not_think_say_so(parse: Callable[..., ParsedCompletion]) -> None:
    assert only(parse(PLAIN, think=False)).think is False
    assert "tiny does not think" in refused(partial(parse, PLAIN), "think", None, think=True)


@BOTH
def test_formats_are_json_or_a_schema(parse: Callable[..., ParsedCompletion]) -> None:
    assert only(parse(format="")).response_format is None
    found = only(parse(format="json")).response_format
    assert found is not None
    assert found.kind is FormatKind.JSON_OBJECT
    found = only(parse(format={"type": "object"})).response_format
    assert found is not None
    assert (found.kind, found.text, found.origin) == (FormatKind.JSON_SCHEMA, '{"type": "object"}', "format")
    refused(parse, "format", None, format="xml")


def test_formats_and_tools_exclude_each_other() -> None:
    refused(chat, "format", None, format="json", tools=[TOOL])


@BOTH
def test_logprobs_are_those_of_chat_completions(parse: Callable[..., ParsedCompletion]) -> None:
    assert only(parse(logprobs=True)).logprobs == 0
    assert only(parse(logprobs=True, top_logprobs=3)).logprobs == 3
    refused(parse, "top_logprobs", None, logprobs=True, top_logprobs=21)


@pytest.mark.parametrize("fields", [{"messages": []}, {"messages": None}])
def test_chats_without_messages_only_load_the_model(fields: dict[str, Any]) -> None:
    parsed = chat(**fields)
    assert (parsed.requests, parsed.stream) == ((), False)


def test_a_keep_alive_of_0_without_messages_unloads() -> None:
    assert only_unloads_chat({"model": "tiny", "keep_alive": 0})
    assert only_unloads_generate({"prompt": "", "keep_alive": "0s"})
    assert not only_unloads_chat({"messages": [USER], "keep_alive": 0})
    assert not only_unloads_chat({"messages": [], "keep_alive": 1})
    assert not only_unloads_generate({"suffix": "}", "keep_alive": 0})
    with pytest.raises(InvalidField, match="model"):
        only_unloads_chat({"model": 5, "keep_alive": 0})


def test_empty_prompts_only_load_the_model() -> None:
    assert generate(prompt="").requests == generate(prompt=None).requests == ()


def test_prompts_go_through_the_chat_template() -> None:
    found = only(generate(system="Be brief.")).prompt
    assert found == ChatPrompt([{"role": "system", "content": "Be brief."}, USER])
    assert only(generate(system="")).prompt == ChatPrompt([USER])


def test_raw_prompts_skip_the_chat_template() -> None:
    parsed = generate(raw=True, think=True)
    assert (only(parsed).prompt, parsed.ignored) == (TextPrompt("Hi"), ("think",))
    assert only(generate(BASE)).prompt == TextPrompt("Hi")


def test_a_suffix_makes_a_gap_to_fill() -> None:
    filling = partial(generate, structs.replace(FACTS, fills=True))
    assert only(filling(prompt="def f():", suffix="return 5")).prompt == FillPrompt("def f():", "return 5")
    assert only(filling(prompt="", suffix="return 5", think=False)).prompt == FillPrompt("", "return 5")
    assert filling(suffix="x", think=False).ignored == ("think",)
    assert only(filling(suffix="")).prompt == ChatPrompt([USER])
    refused(filling, "suffix", None, suffix="x", raw=True)
    refused(filling, "suffix", None, suffix="x", system="Be brief.")
    refused(partial(generate, structs.replace(FACTS, fills=False)), "suffix", None, suffix="x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "images[0]"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"_debug_render_only": True}, "_debug_render_only"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_invalid_and_unsupported_prompts_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(generate, param, None, **fields)


def test_models_without_a_template_have_no_chats() -> None:
    refused(partial(chat, BASE), "messages")
    refused(partial(generate, BASE), "system", None, system="Be brief.")
