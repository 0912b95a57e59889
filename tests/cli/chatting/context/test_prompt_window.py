"""Tests of a full context: `stop` refuses the question, and `forget` leaves the oldest turns out of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend, echo
from llmrun.base.errors import ContextExceeded
from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.store import Store, read_conversation
from llmrun.engine.requests import Event, Request
from llmrun.options.settings import Settings
from tests.support.cli.chats import Session, journals, session

pytestmark = pytest.mark.push

Capture = pytest.CaptureFixture[str]

FORGET = Settings(on_full="forget", max_tokens=8, seed=7)
TURNS = [f"question {number} of several" for number in range(12)]


def noise(context_size: int = 300) -> ScriptedBackend:
    """Return a model whose every answer depends on all earlier tokens."""
    return ScriptedBackend(None, context_size=context_size)


def only_last(conversation: Conversation, turns: int) -> Conversation:
    """Return a new conversation that holds only the last turns."""
    fresh = new_conversation("scripted")
    fresh.system, fresh.exchanges = conversation.system, conversation.exchanges[-turns:]
    return fresh


def test_the_answer_is_that_of_a_conversation_with_only_the_turns_that_are_left(tmp_path: Path) -> None:
    with session(tmp_path / "long", backend=noise(), settings=FORGET) as found:
        found.run("/system be brief", *TURNS)
        whole, left_out = found.chat.conversation, found.chat._window.left_out
        assert len(whole.exchanges) == len(TURNS)
        assert 0 < left_out < len(TURNS) - 2
    fresh = only_last(whole, len(TURNS) - left_out)
    question = fresh.exchanges.pop().question
    record = ConversationRecord(Store(tmp_path / "short"), fresh)
    with session(tmp_path, backend=noise(), record=record, settings=FORGET) as found:
        found.run(question)
        assert found.said[-1] == (whole.exchanges[-1].question, whole.exchanges[-1].answer)
        assert found.chat._window.left_out == 0


def test_the_saved_conversation_keeps_all_turns(tmp_path: Path) -> None:
    with session(tmp_path, backend=noise(), settings=FORGET) as found:
        found.run(*TURNS)
    saved = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.question for one in saved.exchanges] == TURNS
    assert all(one.answer for one in saved.exchanges)


def test_it_is_said_once_for_each_step_how_many_turns_are_left_out(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, backend=noise(), settings=FORGET) as found:
        found.run(*TURNS)
    notes = [line for line in capsys.readouterr().err.splitlines() if "the context is full" in line]
    assert 0 < len(notes) < 4
    assert notes[0].startswith("note: the context is full: the model no longer sees the oldest ")
    assert notes[0].endswith("; they stay in the saved conversation")


def test_stop_is_the_default_and_forget_can_be_set_in_the_chat(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, backend=noise(), settings=Settings(max_tokens=8)) as found:
        found.run(*TURNS)
        answered = len(found.said)
        assert answered < len(TURNS)
        assert "hint: /set on_full forget continues without the oldest turns" in capsys.readouterr().err
        found.run("/set on_full forget", "goes on")
        assert len(found.said) == answered + 1
        found.run("/set on_full stop", "not any more")
        assert len(found.said) == answered + 1
        assert found.chat.conversation.preferences == {"on_full": "stop"}


@pytest.mark.parametrize("on_full", ["stop", "forget"])
def test_a_question_too_long_by_itself_is_refused_and_can_be_edited(
    tmp_path: Path, capsys: Capture, on_full: str
) -> None:
    long = "x" * 400
    settings = Settings(on_full=on_full, max_tokens=8)
    with session(tmp_path, backend=ScriptedBackend(echo, context_size=300), settings=settings) as found:
        assert found.run("one", long, "two") == 0
        assert [question for question, _ in found.said] == ["one", "two"]
        assert found.turns.drafts[2] == long
    told = capsys.readouterr().err
    assert "error: the question alone does not fit in the context: " in told
    assert "limit of 300" in told
    assert "hint: shorten the question" in told


def test_a_question_that_is_refused_forgets_nothing(tmp_path: Path, capsys: Capture) -> None:
    settings = Settings(on_full="forget", max_tokens=8)
    with session(tmp_path, backend=ScriptedBackend(echo, context_size=300), settings=settings) as found:
        found.run("one", "two", "x" * 400, "three")
        assert found.chat._window.left_out == 0
    assert "no longer sees" not in capsys.readouterr().err
    with session(tmp_path, settings=settings) as found:
        ServerSession(found)
        found.run("one", "x" * 200)
        assert found.chat._window.left_out == 0


def test_an_answer_that_runs_into_the_end_says_what_the_next_question_does(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path, backend=noise(100), settings=Settings(on_full="forget", seed=7)) as found:
        found.run("one", "two")
        assert len(found.said) == 2
    told = capsys.readouterr().err
    assert "the answer was cut off: the context of 100 tokens is full: the next prompt will leave out" in told
    assert "the oldest 1 turn (of 1)" in told


def test_undo_and_clear_bring_the_prompt_back_to_what_is_there(tmp_path: Path) -> None:
    with session(tmp_path, backend=noise(), settings=FORGET) as found:
        found.run(*TURNS, "/clear", "fresh", "again")
        assert len(found.said) == 2
        assert found.chat._window.left_out == 0


class ServerSession:
    """A session whose engine behaves like a server: it refuses prompts that are too long and counts no tokens."""

    def __init__(self, found: Session) -> None:
        self._engine = found.chat.engine
        self._counted, self._generate = self._engine.prompt_tokens, self._engine.generate
        self.refused = 0
        self._engine.prompt_tokens = lambda request: None  # type: ignore[method-assign]
        self._engine.generate = self.generate  # type: ignore[method-assign]

    def generate(self, request: Request) -> Iterator[Event]:
        if (self._counted(request) or 0) > 150:
            self.refused += 1
            raise ContextExceeded("prompt does not fit in the context: by the server's word")
        yield from self._generate(request)


def test_a_server_that_refuses_gets_fewer_turns_until_it_takes_them(tmp_path: Path) -> None:
    with session(tmp_path, settings=FORGET) as found:
        server = ServerSession(found)
        found.run(*TURNS)
        assert [question for question, _ in found.said] == TURNS
        assert 0 < server.refused < len(TURNS)
        found.run("x" * 200)
        assert [question for question, _ in found.said] == TURNS
