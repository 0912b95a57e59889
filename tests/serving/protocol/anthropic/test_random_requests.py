"""Tests with random requests: they are either accepted by the engine's checks or refused with a clear error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from llmrun.engine.requests import check_request
from llmrun.serving.protocol.anthropic.requests import parse_count, parse_message
from llmrun.serving.protocol.parsed import ignored_names
from tests.support.protocol.answers import FACTS, SEED, sent
from tests.support.protocol.mutated import MESSAGE, mutated
from tests.support.protocol.refusals import accepted

pytestmark = pytest.mark.push

REQUIRED = {"model": "tiny", "max_tokens": 10}


@given(mutated(MESSAGE))
def test_random_messages_are_accepted_or_refused(body: dict[str, Any]) -> None:
    body = {**REQUIRED, **body}
    if accepted(lambda: parse_message(sent(body), FACTS, SEED)):
        parsed = parse_message(sent(body), FACTS, SEED)
        check_request(parsed.request, FACTS.info.vocabulary_size)
        assert ignored_names(parsed.ignored).isascii()
        counted = parse_count(sent(body), FACTS).requests[0]
        assert counted.prompt == parsed.request.prompt, "the count is that of the message"


@given(mutated(MESSAGE))
def test_random_counts_are_accepted_or_refused(body: dict[str, Any]) -> None:
    accepted(lambda: parse_count(sent({**REQUIRED, **body}), FACTS))
