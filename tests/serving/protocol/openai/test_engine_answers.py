"""Tests from a request's JSON through an engine to the answer's JSON, on a scripted model with a real template."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.engine.engine import Engine
from llmrun.serving.protocol.openai.responses import ChatAnswer
from tests.support.protocol.answers import FACTS, USER, assembled, chat, official_chat, run
from tests.support.tool_calls.formats import real_case, source_of

pytestmark = pytest.mark.push

NAME = "Qwen-Qwen3-0.6B"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def backend(said: str) -> ScriptedBackend:
    tokenizer = real_case(NAME).tokenizer
    controls = tuple(tokenizer.token_text(token) for token in range(256, tokenizer.vocabulary_size))
    return ScriptedBackend(
        scripted_answers([("assistant\n", said)], controls), chat_template=source_of(NAME), control_tokens=controls
    )


def answered(said: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the body of an answer, and the body that OpenAI's client makes of the same answer as a stream."""
    with Engine(backend(said)) as engine:
        facts = structs.replace(FACTS, info=engine.info)
        parsed = chat(facts, stream=True, temperature=0, stream_options={"include_usage": True}, **fields)
        choices = {engine.submit(request): index for index, request in enumerate(parsed.requests)}
        events = []
        while not engine.idle:
            events += [(choices[event.request_id], event) for event in engine.step()]
    answer = ChatAnswer(parsed, facts, "chatcmpl-1", 1_700_000_000)
    chunks = run(answer, events)
    return answer.whole(), assembled(chunks)


def test_a_tool_call_reaches_the_client() -> None:
    whole, streamed = answered(f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", tools=[WEATHER], n=2)
    official_chat(whole)
    for body in (whole, streamed):
        for choice in body["choices"]:
            message = choice["message"]
            assert message["reasoning_content"] == "hm"
            function = message["tool_calls"][0]["function"]
            assert (function["name"], function["arguments"]) == ("weather", '{"city": "Oslo"}')
            assert choice["finish_reason"] == "tool_calls"
    assert whole["usage"] == streamed["usage"]
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in [*whole["choices"], *streamed["choices"]]]
    assert len({*ids}) == 1, "equal answers have equal IDs, so that the next turn finds its cached prefix"


def test_an_unopened_thought_is_no_answer() -> None:
    whole, streamed = answered("hm\n</think>\n\nYes.<|im_end|>")
    for body in (whole, streamed):
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == ("hm", "Yes.")


def test_a_past_call_and_its_result_are_understood() -> None:
    first, _ = answered(f"<think>\n\n</think>\n\n{CALL}<|im_end|>", tools=[WEATHER])
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    later, _ = answered("<think>\n\n</think>\n\nRain.<|im_end|>", tools=[WEATHER], messages=[USER, message, result])
    assert later["choices"][0]["message"]["content"] == "Rain."
    assert later["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
