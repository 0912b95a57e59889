"""Tests of the other fields of /v1/messages and of /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.serving.protocol.errors import InvalidField
from tests.support.protocol.answers import FACTS, SEED
from tests.support.protocol.anthropic_answers import TOOL, USER, count, message, prompt_of

# Claude Code sends these fields with every request, besides its messages and tools.
AGENT: dict[str, Any] = {
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "tools": [{**TOOL, "eager_input_streaming": True}],
}


def test_options_are_read() -> None:
    parsed = message(max_tokens=7, stop_sequences=["a"], temperature=0.5, top_k=3, min_p=0.1, seed=4, stream=True)
    request = parsed.request
    assert (request.max_tokens, request.stop, parsed.stream, parsed.seed) == (7, ("a",), True, 4)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 3, 0.1, 4)


def test_defaults_are_those_of_the_model() -> None:
    parsed = message()
    assert parsed.request.sampling == replace(FACTS.default_sampling, seed=SEED)
    assert (parsed.stream, parsed.ignored) == (False, ())


def test_everything_that_an_agent_sends_is_understood() -> None:
    assert message(**AGENT).ignored == ()


def test_harmless_values_are_not_named() -> None:
    fields = {"service_tier": "auto", "speed": "standard", "cache_control": {"type": "ephemeral"}, "mcp_servers": []}
    assert message(**fields).ignored == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"metadata": {"team": "a"}}, "metadata.team"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
            "context_management.edits[].keep",
        ),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_fields_without_effect_are_named(fields: dict[str, Any], name: str) -> None:
    assert message(**fields).ignored == (name,)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 33}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": "a"}, "metadata"),
        ({"container": "a"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "("}], "tools": [TOOL]}, "messages"),
    ],
)
def test_invalid_and_unsupported_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        message(**fields)
    assert caught.value.param == param


def test_models_without_a_template_refuse_messages() -> None:
    with pytest.raises(InvalidField, match="no chat template"):
        message(structs.replace(FACTS, takes_chats=False))


def test_the_counted_prompt_is_that_of_the_message() -> None:
    fields = {name: AGENT[name] for name in ("system", "tools", "thinking", "output_config")}
    request = count(**fields)
    assert request.prompt == prompt_of(**fields)
    assert (request.think, request.max_tokens) == (True, None)


def test_the_format_is_no_part_of_the_prompt() -> None:
    assert count(output_config={"format": {"type": "json_schema", "schema": {}}}).response_format is None
    with pytest.raises(InvalidField):
        count(output_config={"format": {"type": "xml"}})
