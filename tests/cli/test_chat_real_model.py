"""Tests of `llmrun chat` with the real model on the CPU engine: what a turn computes, and that it knows its past."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.store import Store, read_conversation
from tests.support.cli.chats import environment, events_in, journals, words
from tests.support.cli.commands import llmrun
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

END_OF_ANSWER = 1  # drawn, but not run


@pytest.mark.night
def test_a_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    """An answer may be tokenized differently when it comes back as text. Up to one answer is therefore computed again,
    but nothing before it.
    """
    turns = ["Tell me about Paris.", "Name a colour.", "/undo", "Name an animal.", "/regen", "Thank you."]
    done = llmrun(
        "chat",
        "-q",
        str(smollm2()),
        "--temp",
        "0",
        "-n",
        "24",
        "-c",
        "1024",
        stdin=words(turns).encode(),
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    about_an_animal = done.stdout.decode().splitlines()[2]
    assert "Paris" in about_an_animal
    assert done.stderr == b""
    (path,) = journals(tmp_path)
    first, color, animal, again, thanks = [event for event in events_in(path) if event["event"] == "answered"]
    assert first["cached_tokens"] == 0
    for earlier, later in ((first, color), (again, thanks)):
        assert earlier["prompt_tokens"] <= later["cached_tokens"] <= earlier["context_used"] - END_OF_ANSWER
    assert animal["cached_tokens"] >= color["cached_tokens"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert again["generated_tokens"] == animal["generated_tokens"]


@pytest.mark.night
def test_with_on_full_forget_the_answer_is_that_of_the_turns_that_are_left(tmp_path: Path) -> None:
    """The prompt of the remaining turns is prefilled like that of a new conversation, so the bytes are equal."""
    options = ("chat", "-q", str(smollm2()), "--seed", "3", "-n", "24", "-c", "256")
    turns = [f"Tell me one fact about the number {number}." for number in range(8)]
    done = llmrun(*options, stdin=words(["/set on_full forget", *turns]).encode(), env=environment(tmp_path / "long"))
    assert done.returncode == 0, done.stderr
    whole = read_conversation(journals(tmp_path / "long")[0]).conversation
    last = whole.exchanges[-1]
    assert last.ended is not None
    assert len(whole.exchanges) == len(turns)
    fresh = new_conversation(str(smollm2()))
    fresh.preferences = dict(whole.preferences)
    store = Store(tmp_path / "short" / "conversations")
    for kept in range(1, len(turns)):
        fresh.exchanges = whole.exchanges[-1 - kept : -1]
        store.save(f"kept {kept}", fresh)
        asked = words([f"/load kept {kept}", turns[-1]]).encode()
        again = llmrun(*options, stdin=asked, env=environment(tmp_path / "short"))
        assert again.returncode == 0, again.stderr
        newest = read_conversation(journals(tmp_path / "short")[-1]).conversation.exchanges[-1]
        assert newest.ended is not None
        if newest.ended.prompt_tokens == last.ended.prompt_tokens:
            assert newest.answer == last.answer
            return
    raise AssertionError("no number of turns has the same prompt")
