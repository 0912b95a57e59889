"""Tests of llama-server's routes over HTTP, with the requests of programs that use them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.errors import ModelFileError
from llmrun.base.types import FinishReason, TokenLogprob
from llmrun.engine.constraint.base import FormatKind
from llmrun.engine.requests import Finished, PrefillProgress, TextDelta, TokenLogprobs
from llmrun.serving.options import ServingOptions
from tests.support.cli.commands import script_file
from tests.support.protocol.answers import EDITOR
from tests.support.serving.fake_model import FACTS, HOLD, TIMINGS, FakeModel, text
from tests.support.serving.serve_process import served
from tests.support.serving.servers import RunningServer, serving

BODY = {"input_prefix": "a", "input_suffix": "b"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running


def test_the_answer_is_one_object(server: RunningServer) -> None:
    reply = server.send("POST", "/infill", {**BODY, "n_indent": 4})
    assert (reply.status, reply.json["content"], reply.json["model"]) == (200, "Hello there", "fake")
    assert reply.headers["x-llmrun-ignored"] == "n_indent"


def test_several_choices_are_a_list(server: RunningServer) -> None:
    reply = server.send("POST", "/infill", {**BODY, "n_cmpl": 2})
    assert [each["content"] for each in json.loads(reply.body)] == ["Hello there"] * 2


def test_streams_end_without_a_mark(server: RunningServer) -> None:
    reply = server.send("POST", "/infill", {**BODY, "stream": True})
    events = [line for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["content"] for chunk in chunks] == ["Hello", " there", ""]
    assert [chunk["stop"] for chunk in chunks] == [False, False, True]


@pytest.mark.parametrize("body", [{"input_prefix": "a"}, {**BODY, "model": "other"}])
def test_errors_have_llama_servers_form(server: RunningServer, body: dict[str, str]) -> None:
    reply = server.send("POST", "/infill", body)
    assert reply.json["error"]["code"] == reply.status
    assert {*reply.json["error"]} == {"code", "message", "type"}


def test_an_error_in_a_stream_is_its_last_event() -> None:
    model = FakeModel(lambda number: [*text("Hello")[:-1], ModelFileError("broken")])
    with serving(model) as running:
        reply = running.send("POST", "/infill", {**BODY, "stream": True})
    last = reply.body.decode().strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500


# What SillyTavern sends to llama.cpp, with all samplers shown and token probabilities requested.
SILLY_TAVERN: dict[str, Any] = {
    "prompt": "### User:\nHello\n### Assistant:\n",
    "max_new_tokens": 200,
    "max_tokens": 200,
    "logprobs": 10,
    "temperature": 0.7,
    "top_p": 0.9,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": -1,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 20,
    "add_bos_token": True,
    "dynamic_temperature": True,
    "dynatemp_low": 0.5,
    "dynatemp_high": 0.9,
    "dynatemp_range": 0.2,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "xtc", "temperature"],
    "stopping_strings": ["\nUser:", ""],
    "stop": ["\nUser:", ""],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "llamacpp",
    "api_server": "http://127.0.0.1:8080/",
    "legacy_api": False,
    "xtc_threshold": 0.1,
    "xtc_probability": 0.5,
    "rep_pen": 1.1,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "seed": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "repeat_penalty": 1.1,
    "tfs_z": 1,
    "repeat_last_n": 0,
    "n_predict": 200,
    "num_predict": 200,
    "num_ctx": 8192,
    "mirostat": 0,
    "ignore_eos": False,
    "n_probs": 10,
    "rep_pen_slope": 1,
    "logit_bias": [[50, -2.5], [60, False]],
    "grammar": "",
    "cache_prompt": True,
}


def likely(word: str) -> TextDelta:
    top = TokenLogprob(7, word.encode(), -0.25), TokenLogprob(8, b"other", -1.5)
    return TextDelta(0, word, (7,), (TokenLogprobs(top[0], top),))


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in body.decode().splitlines() if line.startswith("data: ")]


def test_sillytavern_gets_text_and_probabilities() -> None:
    """The program joins `content`, and shows `top_logprobs` of the first token of each event."""
    end = Finished(0, FinishReason.STOP, "\nUser:", 5, TIMINGS)
    model = FakeModel(lambda number: [PrefillProgress(0, 3, 3), likely("Hel"), likely("lo"), end])
    with serving(model) as running:
        reply = running.send("POST", "/completion", {**SILLY_TAVERN, "stream": True})
        whole = running.send("POST", "/completion", {**SILLY_TAVERN, "stream": False})
    assert reply.status == whole.status == 200
    events = events_of(reply.body)
    assert "".join(event["content"] for event in events) == whole.json["content"] == "Hello"
    shown = [[each["token"], each["logprob"]] for each in events[0]["completion_probabilities"][0]["top_logprobs"]]
    assert shown == [["Hel", -0.25], ["other", -1.5]]
    last = events[-1]
    assert (last["stop"], last["stop_type"], last["stopping_word"]) == (True, "word", "\nUser:")
    assert {"truncated", "tokens_cached", "timings"} < {*last}
    sampling = model.asked[0].request.sampling
    assert sampling.samplers == "top_k;top_p;min_p;xtc;temperature"  # llama-server does not know the others, either
    assert (sampling.repeat_penalty, sampling.dry_multiplier, sampling.dynatemp_range) == (1.1, 0.8, 0.2)
    assert sampling.logit_bias == {50: -2.5, 60: -math.inf}
    request = model.asked[0].request
    assert (request.max_tokens, request.stop, request.logprobs) == (200, ("\nUser:",), 10)
    assert request.response_format is None
    ignored = reply.headers["x-llmrun-ignored"]
    assert ignored.startswith(
        "samplers.tfs_z, samplers.typical_p, repetition_penalty, max_new_tokens, typical, sampler_seed"
    )


def test_sillytaverns_schema_replaces_its_grammar(server: RunningServer) -> None:
    body = {name: value for name, value in SILLY_TAVERN.items() if not name.startswith("grammar")}
    assert server.send("POST", "/completion", {**body, "json_schema": {"type": "string"}}).status == 200
    asked = server.model.asked[-1].request.response_format
    assert asked is not None
    assert (asked.kind, asked.text) == (FormatKind.JSON_SCHEMA, '{"type": "string"}')


def test_sillytavern_reads_the_properties_and_slots(server: RunningServer) -> None:
    props = server.send("GET", "/props").json
    assert props["default_generation_settings"]["n_ctx"] == FACTS.info.context_size
    assert (props["total_slots"], props["model_alias"], props["chat_template"]) == (4, "fake", "")
    slots = server.send("GET", "/slots").json
    assert [slot["is_processing"] for slot in slots] == [True, True, False, False]
    assert {*slots[0]} == {"id", "n_ctx", "is_processing"}


def test_llama_vim_reads_the_text_and_the_timings(server: RunningServer) -> None:
    """The editor looks for `"content":"` before it reads the JSON, and for timings with slashes in their names."""
    speeds = [f"timings/{kind}_{name}" for kind in ("prompt", "predicted") for name in ("n", "ms", "per_second")]
    body = {
        **BODY,
        **EDITOR,
        "response_fields": ["content", *speeds, "truncated", "tokens_cached"],
    }
    reply = server.send("POST", "/infill", body)
    assert re.match(rb'^\s*{.*"content"\s*:\s*"', reply.body)
    assert {*reply.json} == {"content", *speeds, "truncated", "tokens_cached"}
    preparing = {"n_predict": 0, "temperature": 0.0, "samplers": [], "t_max_prompt_ms": 1, "response_fields": [""]}
    reply = server.send("POST", "/infill", {**body, **preparing, "input_prefix": "", "input_suffix": "", "prompt": ""})
    assert (reply.status, reply.json) == (200, {})


def test_llama_vim_prepares_an_instruction(server: RunningServer) -> None:
    """While the user writes the instruction, the editor asks for a prompt without an answer."""
    body = {
        "id_slot": 0,
        "messages": [{"role": "system", "content": "You edit text."}, {"role": "user", "content": "x"}],
        "samplers": [],
        "n_predict": 0,
        "stream": False,
        "cache_prompt": True,
        "response_fields": [""],
    }
    reply = server.send("POST", "/v1/chat/completions", {**body, "response_fields": [""]})
    assert reply.status == 200
    assert server.model.asked[-1].request.max_tokens == 0
    assert reply.headers["x-llmrun-ignored"] == "id_slot, cache_prompt, response_fields"


def test_llama_vscode_counts_the_tokens_of_a_prompt(server: RunningServer) -> None:
    assert server.send("GET", "/health").json["status"] == server.send("GET", "/v1/health").json["status"] == "ok"
    (model,) = server.send("GET", "/v1/models").json["data"]
    assert model["meta"]["n_ctx"] == FACTS.info.context_size  # with `meta`, the program takes the server for llama.cpp
    props = server.send("GET", "/props?model=fake&autoload=false")
    assert props.json["default_generation_settings"]["n_ctx"] == FACTS.info.context_size
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = server.send("POST", "/apply-template", {"messages": messages, "model": "fake"})
    assert rendered.json == {"prompt": "<system>Be brief.<user>Hi"}
    body = {"content": rendered.json["prompt"], "add_special": False, "parse_special": True}
    assert len(server.send("POST", "/tokenize", body).json["tokens"]) == len(rendered.json["prompt"])


def test_templates_get_the_tools(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    refused = server.send("POST", "/apply-template", {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]})
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert "tools" in refused.error["message"]


def test_monitors_learn_when_no_slot_is_free() -> None:
    model = FakeModel()
    model.load = replace(model.load, running=4)
    with serving(model) as running:
        assert running.send("GET", "/slots").status == 200
        refused = running.send("GET", "/slots?fail_on_no_slot=1")
        assert (refused.status, refused.error["message"]) == (503, "no slot available")


def test_slots_reveal_no_prompts_and_need_a_key() -> None:
    model = FakeModel(lambda number: [HOLD, *text("secret answer")])
    keys = "a-key-that-is-long-enough", "another-key-that-is-long-enough"
    first, second = ({"authorization": f"Bearer {key}"} for key in keys)
    with serving(model, ServingOptions(keys=keys)) as running, ThreadPoolExecutor() as pool:
        asked = pool.submit(running.send, "POST", "/completion", {"prompt": "secret question"}, first)
        model.wait_for("held")
        for path in ("/slots", "/props"):
            assert running.send("GET", path).status == 401
            assert b"secret" not in running.send("GET", path, headers=second).body
        running.release()
        assert asked.result().json["content"] == "secret answer"


def test_monitors_load_no_model() -> None:
    loaded, other = FakeModel(), FakeModel()
    other.facts = structs.replace(FACTS, name="other")
    with serving(loaded, others=[other]) as running:
        unloading = running.service.models.unload("other")
        asyncio.run_coroutine_threadsafe(unloading, running.loop).result()
        started = other.counted("started")
        for path in ("/slots?model=other", "/props?model=other&autoload=false"):
            refused = running.send("GET", path)
            assert (refused.status, refused.error["type"]) == (503, "unavailable_error")
        assert other.counted("started") == started
        assert running.send("GET", "/props?model=other").json["model_alias"] == "other"
        assert other.counted("started") == started + 1
        assert running.send("GET", "/props?model=nothing").status == 404


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
def test_slots_cannot_be_saved(server: RunningServer, action: str) -> None:
    refused = server.send("POST", f"/slots/0?action={action}", {"filename": "a"})
    assert (refused.status, refused.error["code"]) == (501, 501)


def test_completions_can_be_plural_in_openais_form(server: RunningServer) -> None:
    assert "content" in server.send("POST", "/completion", {"prompt": "a"}).json
    assert "choices" in server.send("POST", "/completions", {"prompt": "a"}).json


@pytest.mark.push
def test_a_real_server_fills_the_gap(tmp_path: Path) -> None:
    controls = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|file_sep|>"]
    cue = "<|file_sep|>a.py\nx = 1<|file_sep|>filename\n<|bos|><fim_prefix>a<fim_suffix>b<fim_middle>"
    other = "<|bos|><fim_prefix>p<fim_suffix>s<fim_middle>"
    script = script_file(tmp_path, [(cue, "c"), (other, "d")], control_tokens=controls)
    with served(script, "--backend", "scripted") as server:
        extra = [{"filename": "a.py", "text": "x = 1"}]
        filled = server.post("/infill", **BODY, input_extra=extra, temperature=0)
        assert (filled["content"], filled["stop_type"], filled["truncated"]) == ("c", "eos", False)
        cut = server.post("/infill", input_prefix="x" * 2000, input_suffix="", n_predict=1)
        assert (cut["truncated"], cut["tokens_evaluated"]) == (True, 1536 + 4 + len("filename\n") + 1)
        completed = server.post("/v1/completions", prompt="p", suffix="s", temperature=0)
        assert completed["choices"][0]["text"] == "d"


@pytest.mark.push
def test_a_real_server_continues_and_renders(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("one two", " three"), ("<|user|>", "chat")])
    with served(script, "--backend", "scripted") as server:
        tokens = server.post("/tokenize", content=" two")["tokens"]
        mixed = server.post("/completion", prompt=["one", *tokens], temperature=0)
        assert (mixed["content"], mixed["stop_type"]) == (" three", "eos")
        several = server.post("/completion", prompt=["one two", ["one two"]], temperature=0)
        assert [each["content"] for each in several] == [" three", " three"]
        rendered = server.post("/apply-template", messages=[{"role": "user", "content": "Hi"}])
        counted = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], n_predict=0)
        assert counted["choices"][0]["message"]["content"] == ""
        tokens = server.post("/tokenize", prompt=rendered["prompt"])["count"]
        assert counted["usage"]["prompt_tokens"] == tokens
