"""Tests of /retry, /copy and /edit."""

from __future__ import annotations

import itertools
import os
import signal
import stat
from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.errors import Cancelled, UsageError
from llmrun.cli.console import programs
from llmrun.options.settings import Settings
from tests.support.cli.chats import events_in, journals, session

Capture = pytest.CaptureFixture[str]


def seeds(data: Path) -> list[int]:
    return [event["seed"] for event in events_in(journals(data)[0]) if event["event"] == "answered"]


# --- /retry -----------------------------------------------------------------------------------------------------------


def test_retry_replaces_the_answer_with_one_of_a_new_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count(1)  # with other seeds, two answers may be equal by chance
    monkeypatch.setattr("llmrun.cli.answers.answering.secrets.randbelow", lambda _: next(drawn))
    with session(tmp_path, backend=ScriptedBackend(None), settings=Settings(max_tokens=8)) as found:
        found.run("one", "two")
        first = found.said
        found.run("/retry")
        assert found.said[0] == first[0]
        assert found.said[1][0] == "two"
        assert found.said[1] != first[1]
    assert len(set(seeds(tmp_path))) == 3


def test_retry_asks_a_question_again_that_got_no_answer(tmp_path: Path) -> None:
    with session(tmp_path) as found:
        forward = found.backend.forward

        def stopped(batch: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            found.backend.forward = forward  # type: ignore[method-assign]
            raise Cancelled("in the middle of a pass")

        found.run("zero")
        found.backend.forward = stopped  # type: ignore[method-assign, assignment]
        found.run("one", "/retry")
        assert found.said == [("zero", "You said: zero"), ("one", "You said: one")]


def test_retry_without_a_question_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    with session(tmp_path) as found:
        found.run("/retry")
    assert "error: /retry: there is no question to answer again" in capsys.readouterr().err


# --- /copy ------------------------------------------------------------------------------------------------------------

ANSWER = "Look:\n```python\nprint(1)\n```\nor\n```\nls\n```\nDone \x1b[31m."


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of copied texts, from a clipboard that accepts everything."""
    texts: list[str] = []

    def copy_text(text: str) -> str:
        texts.append(text)
        return "to a list"

    monkeypatch.setattr(programs, "copy_text", copy_text)
    return texts


def test_copy_copies_the_last_answer_as_it_was_shown(tmp_path: Path, capsys: Capture, copied: list[str]) -> None:
    backend = ScriptedBackend(scripted_answers([("assistant\n", ANSWER)]))
    with session(tmp_path, backend=backend) as found:
        found.run("one", "/copy", "/copy code")
    assert copied == [ANSWER.replace("\x1b", "␛"), "ls"]
    told = capsys.readouterr().err
    assert f"the last answer was copied to a list: {len(ANSWER)} characters" in told
    assert "the last code block was copied to a list: 2 characters" in told


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["/copy"], "/copy: there is no answer yet"),
        (["one", "/copy code"], "the last answer has no code block"),
        (["one", "/copy all"], "/copy: all: unknown argument"),
    ],
)
def test_copy_says_what_it_cannot_copy(
    tmp_path: Path, capsys: Capture, copied: list[str], typed: list[str], said: str
) -> None:
    with session(tmp_path) as found:
        found.run(*typed)
    assert said in capsys.readouterr().err
    assert copied == []


# --- /edit ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an editor with an argument, which records its input and saves the text of `new`."""
    script = tmp_path / "an editor"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -w ] || exit 9\ncp "$2" {tmp_path}/given\nstat -c %a "$2" > {tmp_path}/mode\n'
        f'[ -e {tmp_path}/new ] && cp {tmp_path}/new "$2"\n[ ! -e {tmp_path}/fail ]\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("VISUAL", f"'{script}' -w")
    return tmp_path


def test_edit_begins_with_the_last_question_and_sends_what_is_saved(
    tmp_path: Path, capsys: Capture, editor: Path
) -> None:
    (editor / "new").write_text("two\n/lines\n")
    with session(tmp_path) as found:
        found.run("one", "/edit")
        assert found.said == [("one", "You said: one"), ("two\n/lines", "You said: two\n/lines")]
        assert found.turns.lent_count == 1
    assert (editor / "given").read_text() == "one\n"
    assert (editor / "mode").read_text() == "600\n"
    assert "> two\n> /lines\n" in capsys.readouterr().err


def test_edit_after_undo_begins_with_what_was_taken_back(tmp_path: Path, editor: Path) -> None:
    (editor / "new").write_text("new")
    with session(tmp_path) as found:
        found.run("one", "two", "/undo", "/edit")
        assert found.said == [("one", "You said: one"), ("new", "You said: new")]
    assert (editor / "given").read_text() == "two\n"


def test_edit_begins_with_its_argument(tmp_path: Path, editor: Path) -> None:
    with session(tmp_path) as found:
        found.run("/edit write on")
        assert found.said == [("write on", "You said: write on")]


def test_edit_sends_nothing_that_is_empty_or_unchanged(tmp_path: Path, capsys: Capture, editor: Path) -> None:
    with session(tmp_path) as found:
        found.run("one", "/edit", "two")
        assert found.turns.drafts[2] == "one"
        (editor / "new").write_text(" \n\n")
        found.run("/edit")
        assert [question for question, _ in found.said] == ["one", "two"]
    told = capsys.readouterr().err
    assert "the text is unchanged, so it was not sent yet" in told
    assert "the text is empty, so nothing was sent" in told


def test_an_editor_that_fails_sends_nothing_and_keeps_the_question(
    tmp_path: Path, capsys: Capture, editor: Path
) -> None:
    (editor / "new").write_text("new")
    (editor / "fail").touch()
    with session(tmp_path) as found:
        found.run("one", "/undo", "/edit", "two")
        assert found.turns.drafts == ["", "", "one", "one", *found.turns.drafts[4:]]
        assert [question for question, _ in found.said] == ["two"]
    assert "exit code 1, so its text was not used" in capsys.readouterr().err


def test_edit_in_a_pipe_is_refused(tmp_path: Path, editor: Path) -> None:
    with session(tmp_path, interactive=False) as found, pytest.raises(UsageError, match="needs a terminal"):
        found.run("/edit")
    assert not (editor / "given").exists()
