"""Tests that tool calls run in order, are saved with their results, and can be stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli.chatting import tool_turns
from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import AnswerBegan, AnswerEnded, QuestionAsked, ToolCalled
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.signals import Signals
from llmrun.cli.chatting.store import Store
from llmrun.cli.chatting.tool_turns import REFUSED, ToolTurns
from llmrun.engine.requests import ToolCall
from llmrun.engine.tools.tools_file import CommandDeclaration
from tests.support.cli.chats import ListedTurns
from tests.support.tools.boxes import opened, python_command

ENDED = AnswerEnded("tool_calls", 12, 8, 0, 4, 0.1, 0.2)
STOPPED = "The user stopped this call."
Capture = pytest.CaptureFixture[str]
SAFE = python_command("import sys; print('ran', sys.argv[1:])", "{a}", is_safe=True)
UNSAFE = python_command("print('ran')", name="unsafe")
SLOW = python_command("import time; time.sleep(600)", name="slow", is_safe=True)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConversationRecord]:
    """Yield a conversation whose last answer has just ended."""
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    found = ConversationRecord(Store(tmp_path / "conversations"), new_conversation("m"))
    for event in (QuestionAsked("why?", ""), AnswerBegan(1), ENDED):
        found.add(event)
    yield found
    found.close()


def results(
    record: ConversationRecord,
    *calls: tuple[str, str],
    tools: tuple[CommandDeclaration, ...] = (SAFE, UNSAFE),
    interactive: bool = True,
) -> tuple[list[str], bool]:
    """Run calls, given as names with arguments. Return their results, and whether the model may continue."""
    listed = ListedTurns([], interactive=interactive)
    numbered = [ToolCall(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(calls)]
    with opened(*tools) as box, Signals(lambda: None, lambda: None) as signals:
        went_on = ToolTurns(box.toolbox, listed, signals).run(numbered, record)
    return [message["content"] for message in record.conversation.messages() if message["role"] == "tool"], went_on


def typed(*answers: str | Callable[[], Any] | None) -> Callable[[str], str | None]:
    """Return a replacement for `ask` that types these answers."""
    waiting = list(answers)

    def ask(question: str) -> str | None:
        answer = waiting.pop(0)
        return answer() if callable(answer) else answer

    return ask


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_calls_run_in_order_and_are_saved(record: ConversationRecord) -> None:
    found = results(record, ("program", '{"a": "1"}'), ("program", '{"a": "2"}'))
    assert found == (["ran ['1']\n", "ran ['2']\n"], True)
    assert record.conversation.is_stopped_at_calls


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "Expecting property name"),
        ("[1]", "the value has another type"),
        ("null", "the value has another type"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": "\\ud800"}', "a lone surrogate"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 levels deep"),
        ('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", "nested"),
    ],
)
def test_arguments_that_are_no_object_never_run(
    record: ConversationRecord, capsys: Capture, arguments: str, why: str
) -> None:
    (result,), went_on = results(record, ("program", arguments))
    assert went_on
    assert result.startswith("The arguments are not a valid JSON object: ")
    assert why in result
    assert arguments[:50] in result
    assert len(result) < 1500
    assert capsys.readouterr().err.startswith("note: tool program: the arguments are not a valid JSON object")


def test_an_unknown_tool_is_a_result(record: ConversationRecord) -> None:
    assert results(record, ("nothing\x1b[2J", "{}")) == (
        ["tool nothing\\x1b[2J: no such tool; known: program, unsafe"],
        True,
    )


def test_a_refused_call_lets_the_model_go_on(record: ConversationRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_turns, "ask", typed("n", "y"))
    assert results(record, ("unsafe", "{}"), ("unsafe", "{}")) == ([REFUSED, "ran\n"], True)


def test_the_end_of_input_refuses(record: ConversationRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_turns, "ask", typed(None))
    assert results(record, ("unsafe", "{}")) == ([REFUSED], True)


def test_ctrl_c_in_the_question_stops_all_calls(
    record: ConversationRecord, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(tool_turns, "ask", typed(interrupt))
    assert results(record, ("unsafe", "{}"), ("program", "{}")) == ([STOPPED, STOPPED], False)
    assert "stopped: tool unsafe; /retry lets the model continue" in capsys.readouterr().err


def test_ctrl_c_stops_the_call_that_runs(record: ConversationRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ListedTurns.answering

    def answering(self: ListedTurns) -> Any:
        interrupt()  # the call has been allowed, and its command starts
        return begun(self)

    monkeypatch.setattr(ListedTurns, "answering", answering)
    assert results(record, ("slow", "{}"), ("program", "{}"), tools=(SLOW, SAFE)) == ([STOPPED, STOPPED], False)


def test_ctrl_c_before_the_first_call_stops_all_calls(
    record: ConversationRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = record.add

    def interrupted(event: Any) -> None:
        if isinstance(event, ToolCalled):
            interrupt()
        add(event)

    monkeypatch.setattr(record, "add", interrupted)
    assert results(record, ("program", "{}"), ("program", "{}")) == ([STOPPED, STOPPED], False)


def test_a_pipe_cannot_allow_calls(record: ConversationRecord) -> None:
    found, went_on = results(record, ("unsafe", "{}"), ("program", '{"a": "1"}'), interactive=False)
    assert went_on
    assert found[0].startswith("This tool needs the user's confirmation")
    assert found[1] == "ran ['1']\n"


def test_calls_are_saved_before_they_run(record: ConversationRecord, tmp_path: Path) -> None:
    path = record.path
    assert path is not None
    program = f"print(open({str(path)!r}).read().splitlines()[-1])"
    (result,), _ = results(record, ("reader", "{}"), tools=(python_command(program, name="reader", is_safe=True),))
    assert '"event": "call"' in result
