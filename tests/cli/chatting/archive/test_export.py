"""Tests of exporting conversations as Markdown and JSON."""

from __future__ import annotations

import json
from base64 import b64decode
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given

from llmrun.cli.chatting.archive import to_json, to_markdown
from llmrun.cli.chatting.events import (
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Began,
    Event,
    ImageShown,
    PreferenceSet,
    QuestionAsked,
    SystemSet,
    Thought,
    ToolAnswered,
    ToolCalled,
)
from llmrun.cli.chatting.image_files import ImageFileError, ImageFiles
from tests.support.cli.conversations import folded, histories
from tests.support.engine.pictures import plain, png

BEGAN = Began(3, "c", "/models/fox.gguf", "2026-01-02T03:04:05Z", "0.1.0")
NO_IMAGES = ImageFiles(Path("no-such-folder"))
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
    assert to_markdown(folded(HELD), NO_IMAGES) == (
        "# Why?\n\nfox, 2026-01-02T03:04:05Z, 2 turns\n\n"
        "## System\n\nBe brief.\n\n## You\n\nWhy?\n\n"
        "## fox\n\n<details><summary>Thinking</summary>\n\nLet me see.\n\n</details>\n\n"
        "**Because**␛[31m.\n\n*(stopped)*\n\n## You\n\nAnd?\n"
    )


def test_json_has_the_messages_as_openai_has_them() -> None:
    body = to_json("why", folded(HELD), NO_IMAGES)
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


CALLED: list[Event] = [
    BEGAN,
    QuestionAsked("Why?", "2026-01-02T03:04:06Z"),
    AnswerBegan(7),
    Thought("A tool."),
    AnswerWent("Let me see."),
    AnswerEnded("tool_calls", 12, 8, 0, 4, 0.1, 0.2),
    ToolCalled("x", "e`ch\no", '{"text": "```\\n"}'),
    ToolCalled("y", "time", ""),
    ToolAnswered("x", "````\n# one\x1b[2J\n"),
    AnswerBegan(8),
    AnswerWent("Done."),
    AnswerEnded("stop", 12, 8, 0, 4, 0.1, 0.2),
]


def test_markdown_has_calls_and_results_as_code() -> None:
    text = to_markdown(folded(CALLED), NO_IMAGES)
    assert text.endswith(
        "## fox\n\n<details><summary>Thinking</summary>\n\nA tool.\n\n</details>\n\nLet me see.\n\n"
        "Tool call: `e'ch o`\n\n" + '````\n{"text": "```\\n"}\n````\n\n'
        "Result:\n\n`````\n````\n# one␛[2J\n`````\n\n"
        "Tool call: `time`\n\n```\n\n```\n\n"
        "Result:\n\n```\nThe call was interrupted, and its result is unknown.\n```\n\nDone.\n"
    )


def test_json_has_calls_and_results_as_openai_has_them() -> None:
    question, called, *results, answer = to_json("why", folded(CALLED), NO_IMAGES)["messages"]
    assert question["role"] == "user"
    assert called["tool_calls"][1] == {"id": "y", "type": "function", "function": {"name": "time", "arguments": ""}}
    assert (called["finish_reason"], called["seed"], called["reasoning_content"]) == ("tool_calls", 7, "A tool.")
    assert [(one["role"], one["tool_call_id"]) for one in results] == [("tool", "x"), ("tool", "y")]
    assert answer == {"role": "assistant", "content": "Done.", "finish_reason": "stop", "seed": 8}


def test_stopped_calls_are_exported() -> None:
    conversation = folded(CALLED[:-3])
    assert "Tool call: `time`" in to_markdown(conversation, NO_IMAGES)
    assert [one["role"] for one in to_json("x", conversation, NO_IMAGES)["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]


def test_exports_have_the_images_of_questions(tmp_path: Path) -> None:
    images, data = ImageFiles(tmp_path / "images"), png(plain(3, 2))
    shown = ImageShown(3, sha256(data).hexdigest(), "a]b\x1b.png", "PNG", 3, 2)
    with images.saving([(shown, data)]):
        pass
    conversation = folded([BEGAN, QuestionAsked("is it red?", "", (shown,))])
    link = f"![a\\]b␛.png 3x2]({images.path(shown).as_uri()})"
    assert f"## You\n\n{link}\n\nis it red?\n" in to_markdown(conversation, images)
    first, image, rest = to_json("x", conversation, images)["messages"][0]["content"]
    assert (first["text"], rest["text"]) == ("is ", "it red?")
    assert b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == data


@pytest.mark.push
@given(histories())
def test_every_conversation_can_be_exported(history: list[Event]) -> None:
    conversation = folded(history)
    assert "\x1b" not in to_markdown(conversation, NO_IMAGES)
    if conversation.images:  # their files are missing
        with pytest.raises(ImageFileError):
            to_json("x", conversation, NO_IMAGES)
        return
    assert json.loads(json.dumps(to_json("x", conversation, NO_IMAGES)))["title"] == conversation.title
