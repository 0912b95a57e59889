"""Tests of our own chat templates, which other tests use in place of real ones."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.engine.templates.tool_format import ThinkingTags
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.own_templates import DROPS_THINKING
from tests.support.templates.template_runs import PROCESS

QWEN = (llama_cpp_source() / "vendor/llama.cpp/models/templates/Qwen3.5-4B.jinja").read_text("utf-8")
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": " What is 7 ** 2?\n"}
ANSWERED = {"role": "assistant", "content": "49", "reasoning_content": "7 * 7"}
TAGGED = {"role": "assistant", "content": "<think>\n8 * 8\n</think>\n\n64"}
CONVERSATIONS = (
    [ASKED],
    [SYSTEM, ASKED],
    [ASKED, ANSWERED, ASKED],
    [SYSTEM, ASKED, ANSWERED, ASKED, TAGGED, ASKED],
    [ASKED, ANSWERED],
    [ASKED, TAGGED, ASKED, ANSWERED],
)


def rendered(source: str, messages: list[dict[str, str]], **variables: object) -> str:
    given: dict[str, Any] = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
    return PROCESS.render(source, "t", {**given, **variables, "messages": messages})


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_our_template_renders_like_qwens(messages: list[dict[str, str]], variables: dict[str, object]) -> None:
    assert rendered(DROPS_THINKING, messages, **variables) == rendered(QWEN, messages, **variables)


def test_past_thinking_is_dropped_and_the_switch_is_found() -> None:
    text = rendered(DROPS_THINKING, [SYSTEM, ASKED, ANSWERED, ASKED])
    assert "7 * 7" not in text
    assert "<|im_start|>assistant\n49<|im_end|>\n" in text
    found = PROCESS.abilities(DROPS_THINKING)
    assert (found.reasoning_on, found.reasoning_off) == ({"enable_thinking": True}, {"enable_thinking": False})
    assert (found.is_off_by_default, found.thinking_tags) == (False, ThinkingTags("<think>", "</think>"))
