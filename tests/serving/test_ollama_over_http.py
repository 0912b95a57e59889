"""Tests of Ollama's API over HTTP, with the real `llmrun serve`, a scripted model, and what other programs send."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.commands import script_file
from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}},
    },
}
KV_TOKENS = 8192
TURNS = 5


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A scripted model with the chat template of Qwen3."""
    script = tool_script_file(
        tmp_path_factory.mktemp("tools"),
        ("Weather?", call("get_weather", city="Paris")),
        ("Both?", call("get_weather", city="Paris") + "\n" + call("get_weather", city="Rome")),
        ("Think?", "<think>\nIt is easy.\n</think>\n\nYes."),
        ("Hello?", "Hello!"),
        (RESULT, "It is sunny."),
    )
    with served(script, "--backend", "scripted") as running:
        yield running


def chunks(server: Served, path: str, **body: Any) -> list[Any]:
    """Send a request that must succeed, and return the lines of its answer."""
    status, headers, received = server.call("POST", path, body)
    assert status == 200, received
    assert headers["content-type"] == "application/x-ndjson"
    return [*map(json.loads, received.splitlines())]


def text_of(received: Sequence[Any]) -> str:
    return "".join(chunk["message"]["content"] for chunk in received)


def asking(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


@pytest.mark.night
def test_tools_are_called_and_their_results_used(tools: Served) -> None:
    """Home Assistant sends results without the ID and the name of the call."""
    messages = asking("Both?")
    found = chunks(tools, CHAT, messages=messages, tools=[TOOL])
    calls = [each for chunk in found for each in chunk["message"].get("tool_calls", ())]
    assert [each["function"]["arguments"] for each in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    sent = [{"function": {name: each["function"][name] for name in ("name", "arguments")}} for each in calls]
    messages += [{"role": "assistant", "content": "", "tool_calls": sent}]
    messages += [{"role": "tool", "content": json.dumps({"data": {"sky": sky}})} for sky in ("clear", "grey")]
    assert text_of(chunks(tools, CHAT, messages=messages, tools=[TOOL])) == "It is sunny."


@pytest.mark.push
def test_thinking_is_a_field_of_its_own(tools: Served) -> None:
    found = chunks(tools, CHAT, messages=asking("Think?"), think=True)
    assert "".join(chunk["message"].get("thinking", "") for chunk in found).strip() == "It is easy."
    assert text_of(found).strip() == "Yes."
    body = tools.post(GENERATE, prompt="Think?", stream=False)
    assert (body["thinking"].strip(), body["response"].strip()) == ("It is easy.", "Yes.")


@pytest.mark.push
def test_formats_are_enforced(tools: Served) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    schema["additionalProperties"] = False
    for format_, keys in (("json", None), (schema, ["age"])):
        body = tools.post(
            CHAT, messages=asking("Noise?"), format=format_, think=False, stream=False, options={"seed": 1}
        )
        found = json.loads(body["message"]["content"])
        assert isinstance(found, dict)
        assert keys is None or [*found] == keys


@pytest.mark.push
def test_seeds_repeat_an_answer_in_both_apis(tools: Served) -> None:
    noise = {"temperature": 5.0, "top_k": 0, "top_p": 1, "min_p": 0}
    whole = tools.post(CHAT, messages=asking("Noise?"), stream=False, options={**noise, "num_predict": 12})
    fields = {**noise, "max_tokens": 12, "seed": whole["seed"]}
    body = tools.chat("Noise?", **fields)
    assert body["choices"][0]["message"]["content"] == whole["message"]["content"]
    assert body["system_fingerprint"] == whole["system_fingerprint"]


def test_raw_prompts_continue_a_text(tools: Served) -> None:
    body = tools.post(GENERATE, prompt="abc", raw=True, stream=False, options={"num_predict": 4, "seed": 2})
    assert (body["prompt_eval_count"], body["eval_count"], body["done_reason"]) == (4, 4, "length")  # with a BOS


@pytest.mark.push
def test_gaps_are_filled(tmp_path: Path) -> None:
    """Continue completes code like this."""
    controls = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    cue = "<|bos|><fim_prefix>return <fim_suffix>\n}<fim_middle>"
    script = script_file(tmp_path, [(cue, "5;")], control_tokens=controls)
    with served(script, "--backend", "scripted") as server:
        assert "insert" in server.post("/api/show", name="script")["capabilities"]
        found = chunks(server, GENERATE, prompt="return ", suffix="\n}", options={"num_predict": 2}, keep_alive=1800)
    assert "".join(chunk["response"] for chunk in found) == "5;"


def test_vs_code_finds_the_model_and_its_abilities(tools: Served) -> None:
    """VS Code asks these routes, and then chats with /v1/chat/completions."""
    assert tools.call("GET", "/api/version")[0] == 200
    (listed,) = json.loads(tools.call("GET", "/api/tags")[2])["models"]
    shown = tools.post("/api/show", model=listed["model"])
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 8192
    assert datetime.fromisoformat(listed["modified_at"]).year >= 2026
    assert listed["size"] > 0


@pytest.mark.night
def test_side_requests_of_open_webui_leave_the_chat_cached(tmp_path: Path) -> None:
    """Open WebUI asks for a title, tags and follow-up questions beside each turn.

    Together, these prompts are much longer than the KV cache, so that others are evicted.
    """
    script = tmp_path / "echo.json"
    script.write_text("{}")
    flags = ("--backend", "scripted", "--kv-tokens", str(KV_TOKENS), "--parallel", "4")
    with served(str(script), *flags) as server, ThreadPoolExecutor(4) as pool:
        model = json.loads(server.call("GET", "/api/tags")[2])["models"][0]["model"]
        assert json.loads(server.call("GET", "/api/ps")[2])["models"][0]["name"] == model
        messages: list[dict[str, Any]] = []
        cached_before = side_tokens = 0
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Question {turn}: " + "why? " * 20})
            options = {"temperature": 0.8, "num_ctx": 4096}
            body = {"model": model, "messages": messages, "stream": True, "options": options, "keep_alive": "5m"}
            answer = pool.submit(chunks, server, CHAT, **body)
            sides = [pool.submit(_side_request, server, model, messages, turn, kind) for kind in ("title", "tags", "?")]
            found = answer.result()
            side_tokens += sum(map(_tokens, sides))
            messages.append({"role": "assistant", "content": text_of(found)})
            end = found[-1]
            assert end["timings"]["cache_n"] >= cached_before
            cached_before = end["prompt_eval_count"] + end["eval_count"] - 2  # the end token and the one before it
    assert side_tokens > KV_TOKENS


def _side_request(server: Served, model: str, messages: list[dict[str, Any]], turn: int, kind: str) -> Any:
    history = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in messages)
    prompt = f"### Task {turn}:\nGenerate: {kind}\n<chat_history>\n{history}\n</chat_history>"
    return server.post(
        CHAT, model=model, messages=asking(prompt), stream=False, options={"num_predict": 100}, keep_alive="5m"
    )


def _tokens(side: Future[Any]) -> int:
    return int(side.result()["prompt_eval_count"])


@pytest.mark.night
def test_presets_are_models_with_a_system_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed, shown, loaded and answered under their names."""
    models = tmp_path / "models.toml"
    script = tool_script_file(tmp_path, ("Hello?", "Hello!"))
    models.write_text(f'[presets.pirate]\nmodel = "{script}"\nsystem = "You are a pirate."\ntop_k = 7\n')
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    with served("pirate", "--backend", "scripted") as server:
        (listed,) = json.loads(server.call("GET", "/api/tags")[2])["models"]
        assert listed["name"] == "pirate"
        shown = server.post("/api/show", model="pirate")
        assert shown["system"] == "You are a pirate."
        assert "top_k                          7\n" in shown["parameters"]
        plain = server.post(CHAT, model="pirate", messages=asking("Hello?"), stream=False)
        assert (plain["model"], plain["message"]["content"]) == ("pirate", "Hello!")
        own = [{"role": "system", "content": ""}, *asking("Hello?")]
        other = server.post(CHAT, model="pirate:latest", messages=own, stream=False)
        assert plain["prompt_eval_count"] > other["prompt_eval_count"] + len("You are a pirate.") - 5
