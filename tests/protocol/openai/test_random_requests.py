"""Tests with random requests: they are either accepted by the engine's checks or refused with a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import event, given

from llmrun.engine.requests import check_request
from llmrun.errors import LlmrunError
from llmrun.protocol.errors import api_error, openai_body
from llmrun.protocol.openai.requests import Parsed, parse_chat, parse_completion
from llmrun.protocol.tokens import parse_detokenize, parse_tokenize
from tests.support.protocol.answers import FACTS, sent
from tests.support.protocol.mutated import CHAT, COMPLETION, mutated


def accepted(parse: Callable[[], object]) -> bool:
    """Return whether a request is valid. Otherwise, check the error that its client gets."""
    error = refusal(parse)
    if error is None:
        event("accepted")
        return True
    event("refused")
    found = api_error(error)
    assert found.status in (400, 404)
    assert found.message.isprintable()
    assert len(json.dumps(openai_body(found))) < 2000
    return False


def refusal(parse: Callable[[], object]) -> LlmrunError | None:
    try:
        parse()
    except LlmrunError as error:
        return error
    return None


def check(parsed: Parsed) -> None:
    assert len(parsed.requests) % parsed.n == 0
    assert parsed.ignored_header.isascii()
    for request in parsed.requests:
        check_request(request, FACTS.info.vocabulary_size)


@given(mutated(CHAT))
def test_random_chats_are_accepted_or_refused(body: dict[str, Any]) -> None:
    if accepted(lambda: parse_chat(sent(body), FACTS)):
        check(parse_chat(sent(body), FACTS))


@given(mutated(COMPLETION))
def test_random_completions_are_accepted_or_refused(body: dict[str, Any]) -> None:
    if accepted(lambda: parse_completion(sent(body), FACTS)):
        check(parse_completion(sent(body), FACTS))


@given(mutated({"content": "a", "tokens": [1, 2], "add_special": True, "prompt": "a"}))
def test_random_texts_are_accepted_or_refused(body: dict[str, Any]) -> None:
    accepted(lambda: parse_tokenize(sent(body)))
    accepted(lambda: parse_detokenize(sent(body), FACTS))
