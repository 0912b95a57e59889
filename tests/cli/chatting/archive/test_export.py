"""Tests of exporting conversations as Markdown and JSON."""

from __future__ import annotations

import json

from hypothesis import given

from llmrun.cli.chatting.archive.export import to_json, to_markdown
from llmrun.cli.chatting.events import (
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Began,
    Event,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
)
from tests.support.cli.conversations import folded, histories

BEGAN = Began(3, "c", "/models/fox.gguf", "2026-01-02T03:04:05Z", "0.1.0")
HELD: list[Event] = [
    BEGAN,
    SystemSet("Be brief."),
    PreferenceSet("top_k", 3),
    QuestionAsked("Why?", "2026-01-02T03:04:06Z"),
    AnswerBegan(7),
    Thought("Let me see."),
    AnswerWent("**Because**\x1b[31m."),
    AnswerEnded("cancelled", 12, 8, 0, 4, 0.1, 0.2),
    QuestionAsked("And?", "2026-01-02T03:04:07Z"),
]


def test_markdown_has_a_heading_for_each_turn() -> None:
    assert to_markdown(folded(HELD)) == (
        "# Why?\n\nfox, 2026-01-02T03:04:05Z, 2 turns\n\n"
        "## System\n\nBe brief.\n\n## You\n\nWhy?\n\n"
        "## fox\n\n<details><summary>Thinking</summary>\n\nLet me see.\n\n</details>\n\n"
        "**Because**␛[31m.\n\n*(stopped)*\n\n## You\n\nAnd?\n"
    )


def test_json_has_the_messages_as_openai_has_them() -> None:
    body = to_json("why", folded(HELD))
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?", "time": "2026-01-02T03:04:06Z"},
        {
            "role": "assistant",
            "content": "**Because**\x1b[31m.",
            "reasoning_content": "Let me see.",
            "finish_reason": "cancelled",
            "seed": 7,
        },
        {"role": "user", "content": "And?", "time": "2026-01-02T03:04:07Z"},
    ]
    assert (body["settings"], body["model"]) == ({"top_k": 3}, "/models/fox.gguf")


@given(histories())
def test_every_conversation_can_be_exported(history: list[Event]) -> None:
    conversation = folded(history)
    assert "\x1b" not in to_markdown(conversation)
    assert json.loads(json.dumps(to_json("x", conversation)))["title"] == conversation.title
