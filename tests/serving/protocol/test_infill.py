"""Tests of the bodies and answers of /infill."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from llmrun.base.errors import ContextExceeded, Unavailable
from llmrun.base.types import FinishReason
from llmrun.engine.requests import ContextFile, Event, FillPrompt, PrefillProgress, check_request
from llmrun.serving.protocol.errors import InvalidField, api_error, llama_server_body
from llmrun.serving.protocol.infill import parse_infill
from llmrun.serving.protocol.openai.options import choice_seed
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import FACTS, SEED, chosen, ended, infill, infill_answer, run, said, sent
from tests.support.protocol.mutated import COMPLETION, mutated

# llama.vim sends these requests: one for a completion, and one to prepare the cache.
EDITOR: dict[str, Any] = {
    "id_slot": 0,
    "input_extra": [{"filename": "a.py", "text": "x = 1\n"}],
    "prompt": "    re",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated"],
}
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


def refusal(body: dict[str, Any]) -> InvalidField | None:
    try:
        parse_infill(body, FACTS, SEED)
    except InvalidField as error:
        return error
    return None


@given(mutated(BODY))
def test_random_bodies_are_accepted_or_refused(body: dict[str, Any]) -> None:
    error = refusal(sent(body))
    if error is not None:
        assert llama_server_body(api_error(error))["error"]["code"] == 400
        return
    parsed = parse_infill(sent(body), FACTS, SEED)
    assert ignored_names(parsed.ignored).isascii()
    for request in parsed.requests:
        check_request(request, FACTS.info.vocabulary_size)
