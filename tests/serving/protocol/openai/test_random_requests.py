"""Tests with random requests: they are either accepted by the engine's checks or refused with a clear error."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from llmrun.engine.requests import check_request
from llmrun.serving.protocol.openai.requests import ParsedCompletion, parse_chat, parse_completion
from llmrun.serving.protocol.parsed import ignored_names
from llmrun.serving.protocol.tokens import parse_detokenize, parse_tokenize
from tests.support.protocol.answers import FACTS, SEED, sent
from tests.support.protocol.mutated import CHAT, COMPLETION, mutated
from tests.support.protocol.refusals import accepted


def check(parsed: ParsedCompletion) -> None:
    assert len(parsed.requests) % parsed.n == 0
    assert ignored_names(parsed.ignored).isascii()
    for request in parsed.requests:
        check_request(request, FACTS.info.vocabulary_size)


@given(mutated(CHAT))
def test_random_chats_are_accepted_or_refused(body: dict[str, Any]) -> None:
    if accepted(lambda: parse_chat(sent(body), FACTS, SEED)):
        check(parse_chat(sent(body), FACTS, SEED))


@given(mutated(COMPLETION))
def test_random_completions_are_accepted_or_refused(body: dict[str, Any]) -> None:
    if accepted(lambda: parse_completion(sent(body), FACTS, SEED)):
        check(parse_completion(sent(body), FACTS, SEED))


@given(mutated({"content": "a", "tokens": [1, 2], "add_special": True, "prompt": "a"}))
def test_random_texts_are_accepted_or_refused(body: dict[str, Any]) -> None:
    accepted(lambda: parse_tokenize(sent(body)))
    accepted(lambda: parse_detokenize(sent(body), FACTS))
