"""Tests of the text that chat templates write for conversations."""

from __future__ import annotations

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import TemplateRefused
from llmrun.engine.prompts import PromptReader
from llmrun.engine.requests import ChatPrompt, Request
from tests.support.cli.tool_chats import spelled
from tests.support.templates.template_runs import PROCESS
from tests.support.tool_calls.formats import source_of


def read(template: str, *turns: tuple[str, str]) -> str:
    """Return the prompt for turns, each of which is a role and a text."""
    reader = PromptReader(ScriptedBackend(), PROCESS, template, None)
    return spelled(reader.read(Request(ChatPrompt([{"role": role, "content": text} for role, text in turns]))).tokens)


@pytest.mark.push
@pytest.mark.parametrize("name", ["Qwen3.5-4B", "mistralai-Ministral-3-14B-Reasoning-2512", "Qwen-Qwen3-0.6B"])
def test_developer_messages_may_be_anywhere(name: str) -> None:
    """Codex sends several system messages and two user messages in a row, which some templates refuse."""
    turns = (
        ("system", "Be brief."),
        ("system", "Be fast."),
        ("user", "Folder: a"),
        ("user", "Hi"),
        ("system", "Be kind."),
        ("user", "Bye"),
    )
    text = read(source_of(name), *turns)
    places = [text.index(content) for _, content in turns]
    assert places == sorted(places)
    refuses = name != "Qwen-Qwen3-0.6B"
    assert ("Be brief.\n\nBe fast." in text) == refuses
    assert ("Folder: a\n\nHi\n\n<system-reminder>\nBe kind.\n</system-reminder>\n\nBye" in text) == refuses


def test_a_template_that_refuses_merged_turns_too_gives_its_first_reason() -> None:
    source = "{{ raise_exception('%d turns' % (messages | length)) }}"
    with pytest.raises(TemplateRefused, match="2 turns"):
        read(source, ("user", "a"), ("user", "b"))
