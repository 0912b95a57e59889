"""Tests of POST /infill over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import ModelFileError
from tests.support.cli.commands import script_file
from tests.support.serving.fake_model import FakeModel, text
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
