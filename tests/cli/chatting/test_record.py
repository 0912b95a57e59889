"""Tests that a process killed at any system call has lost nothing that was shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli.chatting.conversation import new_conversation
from llmrun.cli.chatting.events import (
    FORMAT,
    AnswerBegan,
    AnswerEnded,
    AnswerWent,
    Event,
    QuestionAsked,
    Thought,
    ToolAnswered,
    ToolCalled,
    Undone,
    WasThinking,
)
from llmrun.cli.chatting.saying import ConversationRecord, resume_conversation
from llmrun.cli.chatting.store import InUse, Store, lock_journal, read_conversation

CALLS = ("open", "write", "ftruncate", "fsync", "unlink", "replace", "rename")
ENDED = AnswerEnded("stop", 12, 8, 0, 4, 0.1, 0.2)
OLDER = b"""{"event": "began", "format": 2, "conversation": "c", "model": "m", "created": "", "version": ""}
{"event": "question", "text": "old?", "time": ""}
{"event": "answer", "seed": 1}
{"event": "text", "text": "o"}
{"event": "text", "text": "ld"}
"""
EVENTS: list[Event] = [
    QuestionAsked("one?", ""),
    AnswerBegan(1),
    Thought("hm"),
    AnswerWent("a"),
    AnswerWent("b"),
    ENDED,
    QuestionAsked("two?", ""),
    AnswerBegan(2),
    AnswerWent("thinking"),
    WasThinking(),
    AnswerWent("c"),
    ENDED,
    Undone(),
    QuestionAsked("three?", ""),
    AnswerBegan(3),
    AnswerWent("calling"),
    ENDED,
    ToolCalled("x", "echo", "{}"),
    ToolAnswered("x", "result"),
    AnswerBegan(4),
    AnswerWent("d"),
]


class Killed(BaseException):
    """The tests' SIGKILL: after it is raised, none of the process's calls has any effect."""


@contextmanager
def killed_at(call: int, *, torn: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kill the simulated process at its n-th system call, or half-way through that call if it is a torn write.

    Yields a list that holds the number of calls so far.
    """
    count = [0]

    def dying(name: str, real: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] < call:
                return real(*args, **kwargs)
            if count[0] == call and name == "write" and torn:
                real(args[0], args[1][: len(args[1]) // 2])
            raise Killed

        return instead

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, dying(name, getattr(os, name)))
        yield count


def shown_before_death(record: ConversationRecord) -> tuple[list[tuple[str, str, str]], bool]:
    """Replay the events; return what had been shown of each exchange, and whether the process died."""
    shown: list[tuple[str, str, str]] = []
    try:
        for event in EVENTS:
            record.add(event)
            shown = [(one.question, one.thinking, one.answer) for one in record.conversation.exchanges]
    except Killed:
        return shown, True
    return shown, False


def check(found: list[tuple[str, str, str]], shown: list[tuple[str, str, str]]) -> None:
    """Assert that the file holds all that was shown, and at most one event that was not."""
    if len(found) == len(shown) - 1 and shown[-1][0] == "two?":
        return  # the last event undid it
    assert len(found) - len(shown) in (0, 1)
    for (question, thinking, answer), (found_question, found_thinking, found_answer) in zip(shown, found, strict=False):
        assert found_question == question
        assert (found_thinking + found_answer).startswith(thinking + answer)


def exchanges_in(path: Path) -> list[tuple[str, str, str]]:
    return [(one.question, one.thinking, one.answer) for one in read_conversation(path).conversation.exchanges]


@pytest.mark.push
@pytest.mark.parametrize("torn", [False, True], ids=["before a call", "in the middle of a write"])
@pytest.mark.parametrize("older", [False, True], ids=["new", "older format"])
def test_a_process_killed_at_any_system_call_loses_nothing_that_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool, older: bool
) -> None:
    call, died = 0, True
    while died:
        call += 1
        store = Store(tmp_path / str(call))
        record = ConversationRecord(store, new_conversation("m"))
        before: list[tuple[str, str, str]] = []
        if older:
            store.folder.mkdir()
            (store.folder / "old.jsonl").write_bytes(OLDER)
            record, _ = resume_conversation(store, store.folder / "old.jsonl")
            before = [("old?", "", "old")]
        with killed_at(call, torn=torn, monkeypatch=monkeypatch):
            shown, died = shown_before_death(record)
        record.close()  # a dead process holds no lock
        files = store.journals() if store.folder.exists() else []
        assert len(files) == 1 or not shown
        for path in files:
            found = exchanges_in(path)
            check(found, shown or before)
            again, _ = resume_conversation(store, path)
            if again.conversation.unanswered is not None:
                again.add(Undone())
            again.add(QuestionAsked("later?", ""))
            continued = again.path
            assert continued is not None  # it has another name if its first question was undone
            again.close()
            kept = exchanges_in(continued)
            assert kept in ([*found, ("later?", "", "")], [*found[:-1], ("later?", "", "")])
            assert not found or found[-1][2] == "" or kept[:-1] == found
    assert call > 30


def test_another_first_question_renames_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = ConversationRecord(store, new_conversation("m"))
    record.add(QuestionAsked("the old words", ""))
    record.add(Undone())
    record.add(QuestionAsked("the new words", ""))
    assert [path.name for path in store.journals()] == ["the-new-words.jsonl"]
    assert record.path == tmp_path / "the-new-words.jsonl"
    with pytest.raises(InUse):
        lock_journal(record.path)
    lock_journal(tmp_path / "the-old-words.jsonl").release()
    for event in (AnswerBegan(1), AnswerWent("A"), AnswerEnded("stop", 3, 2, 0, 1, 0.1, 0.1)):
        record.add(event)
    record.close()
    assert exchanges_in(tmp_path / "the-new-words.jsonl") == [("the new words", "", "A")]
    lock_journal(tmp_path / "the-new-words.jsonl").release()


def test_a_name_that_still_fits_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = (ConversationRecord(store, new_conversation("m")) for _ in range(2))
    for record in (first, second):
        record.add(QuestionAsked("hello", ""))
    second.add(Undone())
    second.add(QuestionAsked("Hello!", ""))
    assert second.path == tmp_path / "hello-2.jsonl"


@pytest.mark.parametrize("calls", [1, 2], ids=["no result", "one result"])
def test_calls_survive_a_crash_before_their_results(tmp_path: Path, calls: int) -> None:
    store = Store(tmp_path)
    record = ConversationRecord(store, new_conversation("m"))
    for event in (QuestionAsked("why?", ""), AnswerBegan(1), ENDED, ToolCalled("x", "echo", '{"text": "1"}')):
        record.add(event)
    if calls == 2:
        record.add(ToolCalled("y", "echo", "{}"))
        record.add(ToolAnswered("x", "one"))
    before = record.conversation
    record.close()
    (path,) = store.journals()
    again, _ = resume_conversation(store, path)
    assert again.conversation == before
    assert again.conversation.is_stopped_at_calls
    for later in (AnswerBegan(2), AnswerWent("A"), ENDED):
        again.add(later)
    again.close()
    found = read_conversation(path).conversation
    assert found.exchanges[0].answer == "A"
    assert len(found.exchanges[0].rounds[0].calls) == calls


def test_older_files_get_the_format_of_calls(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_bytes(OLDER)
    record, _ = resume_conversation(Store(tmp_path), path)
    record.add(ToolCalled("x", "echo", "{}"))
    record.add(ToolAnswered("x", "one"))
    record.close()
    found = read_conversation(path).conversation
    assert found.began.format == FORMAT
    assert [message["role"] for message in found.messages()] == ["user", "assistant", "tool"]
