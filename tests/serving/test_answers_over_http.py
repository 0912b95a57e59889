"""Tests of answers over HTTP, with the real `llmrun serve` and a scripted model.

Many of the ideas are from llama.cpp's tests of its server.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Makes the noise of the scripted model as likely as its text, so that the seed decides about the answer.
NOISE: dict[str, Any] = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with a context of 256 tokens, which are bytes."""
    with served("scripted", "--backend", "scripted", "--ctx-size", "256") as running:
        yield running
        running.wait_for(running.is_idle)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    answers = (("Weather?", call("get_weather", city="Paris")), ("Hello?", "Hello!"), (RESULT, "It is sunny."))
    with served(tool_script_file(tmp_path_factory.mktemp("tools"), *answers), "--backend", "scripted") as running:
        yield running


def asking(*turns: str) -> dict[str, Any]:
    """Return the messages of a conversation that ends with a question."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]}


def text_of(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.push
def test_counts_add_up(server: Served) -> None:
    def counts() -> tuple[float, float]:
        prompt, generated = (server.metric(f"llmrun_{name}_tokens_total") for name in ("prompt", "generated"))
        return prompt, generated

    prompt, generated = counts()
    usage = server.chat("Count me")["usage"]
    assert usage["completion_tokens"] == len("You said: Count me") + 1  # and the end token
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    expected = prompt + usage["prompt_tokens"], generated + usage["completion_tokens"]
    server.wait_for(lambda: counts() == expected)  # the engine reports them with its next heartbeat


@pytest.mark.push
def test_the_text_of_a_stream_is_that_of_the_whole(server: Served) -> None:
    fields = {**asking("Tell me"), **NOISE, "seed": 3}
    chunks = server.stream(CHAT, **fields)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == text_of(server.post(CHAT, **fields))
    fields = {"prompt": "Tell me", **NOISE, "seed": 3}
    streamed = "".join(chunk["choices"][0]["text"] for chunk in server.stream(COMPLETIONS, **fields))
    assert streamed == server.post(COMPLETIONS, **fields)["choices"][0]["text"]


@pytest.mark.push
def test_seeds_decide_at_any_load(server: Served) -> None:
    def ask(seed: int) -> str:
        return str(server.post(COMPLETIONS, prompt="abc", **NOISE, seed=seed)["choices"][0]["text"])

    alone = [ask(seed) for seed in range(8)]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, range(8))] == alone


def test_a_random_seed_is_returned_and_repeats_the_answer(server: Served) -> None:
    first = server.chat("Hello", **NOISE)
    again = server.chat("Hello", **NOISE, seed=first["seed"])
    assert text_of(first) == text_of(again)
    assert first["seed"] != server.chat("Hello", **NOISE)["seed"]


def test_a_prompt_may_be_text_or_its_tokens(server: Served) -> None:
    tokens = server.post("/tokenize", prompt="abc")["tokens"]
    fields = {**NOISE, "seed": 5}
    answers = [server.post(COMPLETIONS, prompt=prompt, **fields) for prompt in ("abc", tokens, ["abc"], [tokens])]
    assert len({body["choices"][0]["text"] for body in answers}) == 1
    assert {body["usage"]["prompt_tokens"] for body in answers} == {len(tokens)}
    several = server.post(COMPLETIONS, prompt=["abc", tokens], **fields)["choices"]
    assert [(choice["index"], choice["text"]) for choice in several] == [
        (number, answers[0]["choices"][0]["text"]) for number in range(2)
    ]


def test_tokens_and_text_are_converted(server: Served) -> None:
    tokens = server.post("/tokenize", content="né", with_pieces=True)["tokens"]
    assert tokens == [{"id": 110, "piece": "n"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert server.post("/detokenize", tokens=[0x6E, 0xC3, 0xA9])["content"] == "né"
    plain = server.post("/tokenize", content="n")["tokens"]
    assert server.post("/tokenize", content="n", add_special=True)["tokens"][1:] == plain


def test_control_tokens_have_their_text(server: Served) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"
    tokens = server.post("/tokenize", content=text, with_pieces=True)["tokens"]
    assert (tokens[0], tokens[-1]) == ({"id": 258, "piece": "<|im_start|>"}, {"id": 259, "piece": "<|im_end|>"})
    assert server.post("/detokenize", tokens=[each["id"] for each in tokens])["content"] == text


def test_the_tokenizer_is_described(server: Served) -> None:
    info = json.loads(server.call("GET", "/tokenizer_info")[2])
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<|bos|>", "<|im_end|>", 256)
    assert "<|im_start|>" in info["chat_template"]


# lm-evaluation-harness 0.4.13 sends these fields for the log-likelihoods of texts.
EVALUATING: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.mark.push
def test_evaluators_get_the_log_probabilities_of_prompts(server: Served) -> None:
    texts = ["You said: Hello", "Hello", "You said: " + "a" * 150]
    tokens = [server.post("/tokenize", prompt=text)["tokens"] for text in texts]
    together = server.post(COMPLETIONS, prompt=tokens, **EVALUATING)["choices"]
    for index, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
        [alone] = server.post(COMPLETIONS, prompt=text, **EVALUATING)["choices"]
        found = alone["logprobs"]
        assert {len(found[name]) for name in found} == {len(ids) + 1}
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert max(found["token_logprobs"][1:]) <= 0
        assert alone["text"].startswith(text)
        assert found["tokens"][0] == "<|bos|>"
        assert [found["tokens"][place + 1] for place in range(len(text))] == [*text]
        assert found["text_offset"][:3] == [0, 0, 1]
        assert together[index]["logprobs"]["token_logprobs"] == found["token_logprobs"]
        assert together[index]["text"] == "<|bos|>" + alone["text"]


def test_a_streamed_prompt_is_that_of_the_whole(server: Served) -> None:
    fields = {**EVALUATING, "prompt": "You said: " + "a" * 150, "max_tokens": 3}
    [whole] = server.post(COMPLETIONS, **fields)["choices"]
    choices = [chunk["choices"][0] for chunk in server.stream(COMPLETIONS, **fields)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {name: [each for piece in pieces for each in piece[name]] for name in pieces[0]} == whole["logprobs"]


def test_only_the_prompt_may_be_asked_for(server: Served) -> None:
    body = server.post(COMPLETIONS, **{**EVALUATING, "max_tokens": 0}, prompt="Hello", n=2)
    assert [choice["text"] for choice in body["choices"]] == ["Hello", "Hello"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [6, 6]
    assert body["usage"]["completion_tokens"] == 0
    [choice] = server.post(COMPLETIONS, prompt="Hello", max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("", None, "length")


def test_a_conversation_reuses_what_is_cached(server: Served) -> None:
    first = server.post(CHAT, **asking("What now?"))
    second = server.post(CHAT, **asking("What now?", text_of(first), "And then?"))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert second["timings"]["cache_n"] + second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"]
    assert text_of(second) == "You said: And then?"


def test_an_answer_can_be_continued(server: Served) -> None:
    body = server.post(CHAT, **asking("Hello", "You sa"), continue_final_message=True, add_generation_prompt=False)
    assert text_of(body) == "id: Hello"
    assert text_of(server.post(CHAT, **asking("Hello", "You sa"))).startswith("You said: ")  # a turn of its own


def test_the_format_of_a_continued_answer_applies_to_the_whole(server: Served) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    body = server.post(CHAT, **asking("Hello", '{"answer": tr'), **fields, guided_regex=r'\{"answer": (true|false)\}')
    assert text_of(body) == "ue}"
    wanted = {**asking("Hello", "Sure: "), **fields, "response_format": {"type": "json_object"}}
    status, _, received = server.call("POST", CHAT, wanted)
    error = json.loads(received)["error"]
    assert (status, error["param"]) == (400, "response_format")
    assert "the last message is not the beginning of an answer in this format" in error["message"]


def test_answers_end_with_the_context(server: Served) -> None:
    body = server.post(COMPLETIONS, prompt="x" * 200, logit_bias={"259": -100})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("stream", [False, True])
def test_longer_prompts_than_the_context_are_refused(server: Served, stream: bool) -> None:
    status, _, body = server.call("POST", COMPLETIONS, {"prompt": "x" * 300, "stream": stream})
    assert status == 400
    assert json.loads(body)["error"]["code"] == "context_length_exceeded"
    assert b"256" in body


def test_a_banned_token_does_not_occur(server: Served) -> None:
    assert "Y" in text_of(server.chat("Hello", seed=1))
    assert "Y" not in text_of(server.chat("Hello", seed=1, max_tokens=20, logit_bias={str(ord("Y")): -100}))


def test_stop_strings_end_an_answer_without_appearing(server: Served) -> None:
    body = server.chat("Hello", stop=["id", "zz"])
    assert (text_of(body), body["choices"][0]["finish_reason"]) == ("You sa", "stop")
    chunks = server.stream(CHAT, **asking("Hello"), stop="id")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "You sa"


def test_logprobs_are_those_of_the_text(server: Served) -> None:
    content = server.chat("Hi", logprobs=True, top_logprobs=4, temperature=0)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == b"You said: Hi"
    for token in content:
        ranked = [each["logprob"] for each in token["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
        assert token["logprob"] == ranked[0] <= 0


@pytest.mark.push
def test_a_schema_holds_even_for_noise(server: Served) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    fields = {**NOISE, "max_tokens": 100}
    for seed in range(3):
        assert 1 <= json.loads(text_of(server.chat("?", response_format=wanted, seed=seed, **fields)))["n"] <= 9


def test_a_grammar_holds_even_for_noise(server: Served) -> None:
    for seed in range(3):
        body = server.chat("?", grammar='root ::= ("yes" | "no") "!"', seed=seed, **NOISE)
        assert text_of(body) in ("yes!", "no!")
    status, _, _ = server.call("POST", CHAT, {**asking("?"), "grammar": 'root ::= "unclosed'})
    assert status == 400


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.push
def test_tools_are_called_only_when_useful(tools: Served) -> None:
    (called,) = tools.chat("Weather?", tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"city": "Paris"}
    message = tools.chat("Hello?", tools=[WEATHER])["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == ("Hello!", False)
    forbidden = tools.chat("Hello?", tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
    assert forbidden == message


@pytest.mark.push
def test_a_required_tool_is_called_against_the_model_s_will(tools: Served) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    tool = {"type": "function", "function": {"name": "confirm", "parameters": schema}}
    choice = tools.chat("Hello?", tools=[tool], tool_choice="required", max_tokens=400, seed=1)["choices"][0]
    (called,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], called["function"]["name"]) == ("tool_calls", "confirm")
    assert isinstance(json.loads(called["function"]["arguments"])["ok"], bool)


@pytest.mark.night
def test_requests_beside_a_chat_do_not_drop_its_prefix(tmp_path: Path) -> None:
    """Open WebUI lists the models, streams a chat, and asks for a title and tags while the user reads."""
    with served("scripted", "--backend", "scripted", "--kv-tokens", "4096") as server:
        _, _, models = server.call("GET", "/v1/models")
        common = {"model": json.loads(models)["data"][0]["id"], "metadata": {"chat_id": "1"}, "features": {}}
        usage = {"stream_options": {"include_usage": True}}
        chunks = server.stream(CHAT, **asking("Explain foxes."), **common, **usage)
        answer = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        first = chunks[-1]["usage"]
        tasks = [f"### Task: {task}\n<chat>\nExplain foxes.\n{answer}\n</chat>" for task in ("a title", "tags")]
        with ThreadPoolExecutor(2) as pool:
            done = [*pool.map(lambda task: server.chat(task, **common, max_completion_tokens=50), tasks)]
        assert [text_of(body)[:10] for body in done] == ["You said: "] * 2
        chunks = server.stream(CHAT, **asking("Explain foxes.", answer, "And wolves."), **common, **usage)
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["total_tokens"] - 1


UNDERSTOOD = """{
    "n": 1, "stop": [], "tools": [], "tool_choice": "auto", "functions": [], "logit_bias": {}, "logprobs": false,
    "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0, "user": "me", "store": false,
    "parallel_tool_calls": true, "top_k": 40, "min_p": 0.1, "repeat_penalty": 1.1, "seed": null, "audio": null
}"""
IGNORED = """{
    "num_ctx": 8192, "keep_alive": "5m", "options": {"num_ctx": 1}, "cache_prompt": true, "id_slot": 0,
    "chat_id": "1", "session_id": "2", "background_tasks": {}, "prediction": {"type": "content", "content": ""}
}"""


@pytest.mark.push
def test_fields_of_other_programs_are_named_and_harmless(server: Served) -> None:
    """Fields that Continue, LibreChat, SillyTavern and programs for Ollama and llama-server send beside OpenAI's."""
    ignored = json.loads(IGNORED)
    status, headers, body = server.call("POST", CHAT, {**asking("Hello"), **json.loads(UNDERSTOOD), **ignored})
    assert status == 200
    assert headers["x-llmrun-ignored"].split(", ") == [*ignored]
    assert text_of(json.loads(body)) == "You said: Hello"


@pytest.mark.push
def test_a_connection_serves_many_requests(server: Served) -> None:
    line = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    line.connect()
    connection = line.sock
    for number in range(60):
        body = json.dumps({**asking(f"{number}"), "stream": number % 3 == 0})
        line.request("POST", CHAT, body, {"content-type": "application/json"})
        response = line.getresponse()
        assert response.status == 200
        assert response.read()
        assert line.sock is connection
    line.close()
