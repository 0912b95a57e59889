"""Tests with random requests and events: nothing but clear errors, and a stream equals the whole answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from llmrun.base.errors import InvalidAnswer
from llmrun.engine.requests import Event, check_request
from llmrun.serving.protocol.ollama.requests import parse_generate, parse_ollama_chat
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import FACTS, SEED, TOOL, USER, ended, said, sent
from tests.support.protocol.events import chats
from tests.support.protocol.mutated import mutated
from tests.support.protocol.ollama import chat_answer, generate_answer, streamed, whole
from tests.support.protocol.refusals import accepted

_CALL = {"id": "call_1", "function": {"index": 0, "name": "look", "arguments": {}}}
_COMMON: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "think": "low",
    "format": {"type": "object"},
    "keep_alive": "5m",
    "logprobs": True,
    "top_logprobs": 3,
    "options": {"temperature": 0.5, "num_ctx": 4096, "num_predict": 10, "stop": ["a"], "seed": 5, "top_k": 5.0},
}
CHAT: dict[str, Any] = {
    **_COMMON,
    "messages": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_name": "look", "content": "found"},
        {"role": "user", "content": "And?", "images": []},
    ],
    "tools": [TOOL],
}
GENERATE: dict[str, Any] = {
    **_COMMON,
    "prompt": "a",
    "suffix": "c",
    "system": "b",
    "raw": False,
    "template": "",
    "context": [],
}


def check(parse: Callable[..., ParsedCompletion], body: dict[str, Any]) -> None:
    """Assert that a request is valid, or refused with a clear error."""
    if accepted(lambda: parse(sent(body), FACTS, SEED)):
        parsed = parse(sent(body), FACTS, SEED)
        assert ignored_names(parsed.ignored).isascii()
        for request in parsed.requests:
            check_request(request, FACTS.info.vocabulary_size)


@given(mutated(CHAT))
def test_random_chats_are_accepted_or_refused(body: dict[str, Any]) -> None:
    check(parse_ollama_chat, body)


@given(mutated(GENERATE))
def test_random_prompts_are_accepted_or_refused(body: dict[str, Any]) -> None:
    check(parse_generate, body)


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body that a client makes of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    logprobs: list[Any] = []
    for chunk in chunks:
        part = chunk["message"]
        logprobs += chunk.get("logprobs", [])
        for name, empty in (("content", ""), ("thinking", ""), ("tool_calls", [])):
            if part.get(name):
                message[name] = message.get(name, empty) + part[name]
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return {**chunks[-1], "message": message, **({"logprobs": logprobs} if logprobs else {})}


@given(chats())
def test_a_merged_stream_is_the_whole_answer(events: list[Event]) -> None:
    fields = {"options": {"seed": 1}, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    try:
        body = whole(chat_answer(stream=False, **fields), events)
    except InvalidAnswer:
        event("invalid call")
        return
    assert merged(streamed(chat_answer(**fields), events)) == body


@given(chats(with_calls=False))
def test_a_merged_completion_is_the_whole_one(events: list[Event]) -> None:
    fields = {"options": {"seed": 1}, "logprobs": True}
    chunks = streamed(generate_answer(**fields), events)
    body = whole(generate_answer(stream=False, **fields), events)
    assert "".join(chunk["response"] for chunk in chunks) == body["response"]
    assert "".join(chunk.get("thinking", "") for chunk in chunks) == body.get("thinking", "")
    assert [token for chunk in chunks for token in chunk.get("logprobs", [])] == body.get("logprobs", [])


@given(st.text(max_size=20))
def test_thinking_and_answer_are_never_lost(text: str) -> None:
    """A text that may be thinking is held back until it is certain, at the latest at the end."""
    events: list[Event] = [said(text, tentative=True), ended()]
    assert whole(generate_answer(stream=False), events)["response"] == text
    assert "".join(chunk["response"] for chunk in streamed(generate_answer(), events)) == text
