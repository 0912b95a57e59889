"""Tests of the fields that switch thinking on and off."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from llmrun.engine.requests import ChatPrompt
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from tests.support.protocol.answers import FACTS, chat
from tests.support.protocol.refusals import refused

NO_THINKING = structs.replace(FACTS, thinks=False)


def variables(parsed: ParsedCompletion) -> dict[str, Any]:
    prompt = parsed.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return dict(prompt.template_kwargs)


@pytest.mark.parametrize(
    ("fields", "think", "given"),
    [
        ({}, None, {}),
        ({"reasoning_effort": "none"}, False, {}),
        ({"reasoning_effort": "low"}, True, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "xhigh"}, True, {"reasoning_effort": "xhigh"}),
        ({"enable_thinking": False}, False, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"thinking": True, "x": [1]}}, True, {"thinking": True, "x": [1]}),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, None, {"enable_thinking": "yes"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            True,
            {"reasoning_effort": "x"},
        ),
    ],
)
def test_thinking_is_switched(fields: dict[str, Any], think: bool | None, given: dict[str, Any]) -> None:
    parsed = chat(**fields)
    assert (parsed.requests[0].think, variables(parsed), parsed.ignored) == (think, given, ())


@pytest.mark.parametrize("name", ["think_budget", "thinking_budget", "thinking_budget_tokens"])
@pytest.mark.parametrize(("given", "budget"), [(0, 0), (100, 100), (-1, None), (None, None)])
def test_thinking_has_a_budget(name: str, given: int | None, budget: int | None) -> None:
    assert chat(**{name: given}).requests[0].think_budget == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"think_budget": -2}, "think_budget"),
        ({"think_budget": 1.5}, "think_budget"),
        ({"thinking_budget": 5, "think_budget": 6}, "think_budget"),
        ({"enable_thinking": "no"}, "enable_thinking"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(chat, param, **fields)


@pytest.mark.parametrize(
    ("fields", "think", "given", "ignored"),
    [
        ({"reasoning_effort": "high", "enable_thinking": False}, False, {}, ("reasoning_effort",)),
        ({"reasoning_effort": "none", "enable_thinking": True}, True, {}, ("reasoning_effort",)),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            False,
            {"thinking": False},
            ("reasoning_effort",),
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            False,
            {"enable_thinking": False},
            ("enable_thinking",),
        ),
        (
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
            False,
            {"thinking": True, "enable_thinking": False},
            ("chat_template_kwargs.thinking",),
        ),
        (
            {"reasoning_effort": "low", "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            True,
            {"enable_thinking": True, "reasoning_effort": "low"},
            ("enable_thinking",),
        ),
    ],
)
def test_the_most_specific_switch_has_precedence(
    fields: dict[str, Any], think: bool, given: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    parsed = chat(**fields)
    assert (parsed.requests[0].think, variables(parsed), parsed.ignored) == (think, given, ignored)
    parsed = chat(NO_THINKING, **fields)
    assert parsed.requests[0].think is (None if think else False)
    assert {*ignored} <= {*parsed.ignored}


def test_models_that_cannot_think_name_wishes_in_vain() -> None:
    parsed = chat(NO_THINKING, reasoning_effort="high", think_budget=5)
    assert (parsed.requests[0].think, parsed.requests[0].think_budget) == (None, None)
    assert parsed.ignored == ("reasoning_effort", "think_budget")


def test_models_that_cannot_think_obey_when_told_not_to() -> None:
    parsed = chat(NO_THINKING, reasoning_effort="none")
    assert (parsed.requests[0].think, parsed.ignored) == (False, ())
