"""Tests of the bodies and answers of /completion and /infill."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from llmrun.base.errors import ContextExceeded, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import (
    ContextFile,
    Event,
    FillPrompt,
    MixedPrompt,
    ModelFacts,
    PrefillProgress,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_request,
)
from llmrun.serving.protocol.errors import InvalidField, api_error, llama_server_body
from llmrun.serving.protocol.llama_server import ParsedGeneration, parse_infill, parse_llama_completion
from llmrun.serving.protocol.openai.options import choice_seed
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import (
    EDITOR,
    FACTS,
    SEED,
    chosen,
    ended,
    infill,
    infill_answer,
    llama_completion,
    run,
    said,
    sent,
)
from tests.support.protocol.mutated import COMPLETION, mutated

# llama.vim sends this request to prepare the cache.
PREPARING: dict[str, Any] = {**EDITOR, "prompt": "", "n_predict": 0, "samplers": [], "response_fields": [""]}
BODY: dict[str, Any] = {**COMPLETION, **EDITOR, "prompt": "c", "input_prefix": "a", "input_suffix": "b", "n_cmpl": 2}
NOT_HONORED = ("id_slot", "n_indent", "cache_prompt", "t_max_prompt_ms", "t_max_predict_ms")


def test_the_texts_become_a_prompt_that_may_be_cut() -> None:
    (request,) = infill(**EDITOR).requests
    assert request.prompt == FillPrompt("a", "b", "    re", (ContextFile("a.py", "x = 1\n"),), cut=True)
    assert infill().requests[0].prompt == FillPrompt("a", "b", cut=True)
    unnamed = infill(input_extra=[{"text": "x"}]).requests[0].prompt
    assert isinstance(unnamed, FillPrompt)
    assert unnamed.files == (ContextFile("tmp", "x"),)


def test_an_editors_request_is_understood() -> None:
    parsed = infill(**EDITOR)
    (request,) = parsed.requests
    assert (request.max_tokens, request.sampling.samplers, request.sampling.top_p) == (128, "top_k;top_p;infill", 0.9)
    assert parsed.ignored == NOT_HONORED


def test_a_request_without_tokens_only_processes_the_prompt() -> None:
    parsed = infill(**PREPARING)
    assert (parsed.only_prompt, parsed.requests[0].max_tokens, parsed.ignored) == (True, 1, NOT_HONORED)
    answer = infill_answer(n_predict=0)
    assert answer.feed(0, said("x")) == []
    answer.feed(0, ended(FinishReason.LENGTH, generated_tokens=1))
    body = answer.whole()
    assert isinstance(body, dict)
    assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 1, "limit")
    assert body["generation_settings"]["n_predict"] == 0


def test_choices_have_seeds_of_their_own() -> None:
    parsed = infill(n_cmpl=3, seed=7)
    assert [request.seed for request in parsed.requests] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len(infill(n=2).requests) == len(infill(n=2, n_cmpl=2).requests) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": ["b", 1]}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": ""}] * 1025}, "input_extra"),
        ({"prompt": 5}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 2, "n_cmpl": 3}, "n"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora[0].id"),
        ({"min_keep": 1}, "min_keep"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_fields": [1]}, "response_fields[0]"),
    ],
    ids=str,
)
def test_other_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        infill(**fields)
    assert caught.value.param == param


def test_models_that_cannot_fill_are_refused() -> None:
    with pytest.raises(InvalidField, match="this model cannot fill in the middle"):
        infill(structs.replace(FACTS, fills=False))


def test_an_answer_is_one_object() -> None:
    answer = infill_answer(return_tokens=True, n_probs=1, stop=["\n"], max_tokens=9)
    answer.feed(0, said("a\n", logprobs=(chosen(b"a", -0.5, (b"a", -0.5)),)))
    answer.feed(0, structs.replace(ended(), stop="\n", cut_tokens=3))
    body = answer.whole()
    assert isinstance(body, dict)
    assert (body["content"], body["tokens"], body["stop"], body["has_new_line"]) == ("a\n", [1], True, True)
    assert (body["stop_type"], body["stopping_word"], body["truncated"]) == ("word", "\n", True)
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (3, 10, 12)
    entry = {"id": 0, "token": "a", "logprob": -0.5, "bytes": [97]}
    assert body["completion_probabilities"] == [{**entry, "top_logprobs": [entry]}]
    settings = body["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["stop"], settings["n_predict"]) == (5, 0.6, ["\n"], 9)


def test_several_choices_are_a_list() -> None:
    answer = infill_answer(n_cmpl=2)
    for choice, text in enumerate("ab"):
        answer.feed(choice, said(text))
        answer.feed(choice, ended())
    bodies = answer.whole()
    assert isinstance(bodies, list)
    assert [(body["index"], body["content"]) for body in bodies] == [(0, "a"), (1, "b")]


def test_only_the_wanted_fields_are_returned() -> None:
    answer = infill_answer(response_fields=["content", "timings/prompt_n", "truncated", "no/such", "", "content/x"])
    answer.feed(0, said("a"))
    answer.feed(0, ended())
    assert answer.whole() == {"content": "a", "timings/prompt_n": 6, "truncated": False}


def test_a_stream_ends_with_an_event_without_text() -> None:
    answer = infill_answer(stream=True, n_cmpl=2)
    events: list[Event] = [PrefillProgress(0, 5, 5), said("a"), said("b"), ended()]
    chunks = run(answer, [(choice, event) for event in events for choice in (0, 1)])
    for choice in (0, 1):
        first, second, last = (chunk for chunk in chunks if chunk["index"] == choice)
        piece = {"index": choice, "tokens": [1], "stop": False, "tokens_evaluated": 5}
        assert first == {**piece, "content": "a", "tokens_predicted": 1}
        assert second == {**piece, "content": "b", "tokens_predicted": 2}
        assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")


def test_a_cancelled_answer_is_an_error() -> None:
    with pytest.raises(Unavailable):
        infill_answer().feed(0, ended(FinishReason.CANCELLED))


def test_errors_have_llama_servers_form() -> None:
    missing = llama_server_body(api_error(InvalidField("input_prefix", "this field is required")))
    words = "input_prefix: this field is required"
    assert missing == {"error": {"code": 400, "message": words, "type": "invalid_request_error"}}
    long = llama_server_body(api_error(ContextExceeded.by_prompt(9, 5, hint="")))["error"]
    assert (long["code"], long["type"]) == (400, "exceed_context_size_error")
    loading = llama_server_body(api_error(Unavailable("", state="loading")))["error"]
    assert (loading["code"], loading["type"]) == (503, "unavailable_error")


PARSERS: dict[str, Callable[[dict[str, Any], ModelFacts, int], ParsedGeneration]] = {
    "/infill": parse_infill,
    "/completion": parse_llama_completion,
}


def refusal(path: str, body: dict[str, Any]) -> InvalidField | None:
    try:
        PARSERS[path](body, FACTS, SEED)
    except InvalidField as error:
        return error
    return None


@pytest.mark.parametrize("path", PARSERS)
@given(mutated(BODY))
def test_random_bodies_are_accepted_or_refused(path: str, body: dict[str, Any]) -> None:
    error = refusal(path, sent(body))
    if error is not None:
        assert llama_server_body(api_error(error))["error"]["code"] == 400
        return
    parsed = PARSERS[path](sent(body), FACTS, SEED)
    assert ignored_names(parsed.ignored).isascii()
    for request in parsed.requests:
        check_request(request, FACTS.info.vocabulary_size)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [TextPrompt("Hi")]),
        ([5, 6], [TokenPrompt((5, 6))]),
        (["Hi", 5, 6, "x"], [MixedPrompt(("Hi", (5, 6), "x"))]),
        ([5, "Hi"], [MixedPrompt(((5,), "Hi"))]),
        (["", 5, "", "x"], [MixedPrompt(("", (5,), "x"))]),
        (["Hi", "x"], [TextPrompt("Hi"), TextPrompt("x")]),
        (["Hi", [5], ["x", 6]], [TextPrompt("Hi"), TokenPrompt((5,)), MixedPrompt(("x", (6,)))]),
    ],
    ids=str,
)
def test_prompts_may_mix_texts_and_tokens(prompt: Any, expected: list[Prompt]) -> None:
    assert [request.prompt for request in llama_completion(prompt=prompt).requests] == expected
    twice = llama_completion(prompt=prompt, n=2).requests
    assert [request.prompt for request in twice] == [each for each in expected for _ in range(2)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [5, [6]]}, "prompt"),
        ({"prompt": {"multimodal_data": []}}, "prompt.prompt_string"),
        ({"prompt": [1000]}, "prompt[0]"),
        ({"prompt": ["Hi", 1000]}, "prompt[0]"),
        ({"prompt": ["Hi"] * 65, "n": 2}, "prompt"),
        ({"samplers": ["top_k", 5]}, "samplers[1]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"grammar": "root ::= ", "json_schema": {"type": "string"}}, "json_schema"),
        ({"logit_bias": [["text", 1]]}, "logit_bias[0][0]"),
        ({"n_probs": 21}, "n_probs"),
    ],
    ids=str,
)
def test_other_fields_of_completions_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        llama_completion(**fields)
    assert caught.value.param == param


def test_lists_of_tokens_that_are_too_long_are_refused() -> None:
    for prompt in ([5] * 4096, ["Hi", *[5] * 4096], [5, *["Hi"] * 4096]):
        with pytest.raises(ContextExceeded):
            llama_completion(prompt=prompt)


def test_what_llama_server_ignores_is_ignored() -> None:
    parsed = llama_completion(
        samplers=["top_k", "tfs_z"], stop=["", "a"], repeat_penalty=1.1, repetition_penalty=1.5, rep_pen=2, tfs=1
    )
    (request,) = parsed.requests
    assert (request.sampling.samplers, request.stop, request.sampling.repeat_penalty) == ("top_k", ("a",), 1.1)
    assert parsed.ignored == ("samplers.tfs_z", "repetition_penalty", "rep_pen", "tfs")
    assert llama_completion(stop="").requests[0].stop == ()


def test_thousands_of_samplers_take_little_time() -> None:
    began = time.thread_time()
    with pytest.raises(InvalidField):
        llama_completion(samplers=[*["top_k"] * 20_000, *map(str, range(20_000))])
    assert time.thread_time() - began < 1


def test_no_samplers_mean_the_models_own_distribution() -> None:
    for samplers in ([], ["tfs_z"]):
        (request,) = llama_completion(samplers=samplers, temperature=0.2).requests
        assert (request.sampling.samplers, request.sampling.temperature) == ("temperature", 1.0)


def test_an_empty_schema_means_any_object() -> None:
    (request,) = llama_completion(json_schema={}, grammar="").requests
    assert request.response_format is not None
    assert request.response_format.text == '{"type": "object"}'


def test_logprobs_is_another_name_for_n_probs() -> None:
    found = [llama_completion(**each).requests[0].logprobs for each in ({"logprobs": 3}, {"logprobs": 3, "n_probs": 5})]
    assert found == [3, 5]
    assert llama_completion(n_probs=0).requests[0].logprobs is None


def test_events_have_timings_on_request() -> None:
    answer = infill_answer(stream=True, timings_per_token=True)
    assert answer.feed(0, PrefillProgress(0, 10, 10, 4)) == []
    for count in (1, 2):
        ((chunk),) = answer.feed(0, said("a"))
        assert (chunk["timings"]["prompt_n"], chunk["timings"]["cache_n"]) == (6, 4)
        assert chunk["timings"]["predicted_n"] == count
    assert "timings" not in infill_answer(stream=True).feed(0, said("a"))[0]
