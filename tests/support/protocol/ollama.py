"""Requests and answers of Ollama's API for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmrun.engine.requests import Event, ModelFacts
from llmrun.serving.protocol.ollama.answers import OllamaAnswer, ollama_chat, ollama_text
from llmrun.serving.protocol.ollama.requests import parse_generate, parse_ollama_chat
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.openapi import MISSING
from llmrun.serving.protocol.parsed import ApiAnswer
from tests.support.protocol.answers import FACTS, SEED, USER, as_json, sent

OLLAMA_ROUTES = {
    "/api/chat": "post",
    "/api/generate": "post",
    "/api/embed": "post",
    "/api/embeddings": "post",
    "/api/tags": "get",
    "/api/ps": "get",
    "/api/show": "post",
    "/api/version": "get",
    **{path: "delete" if path == "/api/delete" else "post" for path in MISSING},
}
CREATED = 1_700_000_000  # 2023-11-14 22:13:20
CHAT: dict[str, Any] = {"model": "tiny", "messages": [USER]}
GENERATE: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


def chat(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedCompletion:
    return parse_ollama_chat(sent({**CHAT, **fields}), facts, SEED)


def generate(facts: ModelFacts = FACTS, /, **fields: Any) -> ParsedCompletion:
    return parse_generate(sent({**GENERATE, **fields}), facts, SEED)


def chat_answer(**fields: Any) -> ApiAnswer:
    return OllamaAnswer(ollama_chat, chat(**fields), FACTS, "1", CREATED)


def generate_answer(**fields: Any) -> ApiAnswer:
    return OllamaAnswer(ollama_text, generate(**fields), FACTS, "1", CREATED)


def streamed(answer: ApiAnswer, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Feed the events, and return the chunks after their way through JSON."""
    chunks = [chunk for event in events for chunk in answer.feed(0, event)]
    return [as_json(chunk) for chunk in [*chunks, *answer.finish()]]


def whole(answer: ApiAnswer, events: Sequence[Event]) -> dict[str, Any]:
    """Feed the events, and return the body after its way through JSON."""
    for event in events:
        answer.feed(0, event)
    body: dict[str, Any] = as_json(answer.whole())
    return body
