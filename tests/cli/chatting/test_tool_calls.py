"""Tests that every tool call is shown, that unsafe ones wait for the user, and that hostile text stays harmless."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError
from llmrun.cli.chatting import tool_turns
from llmrun.cli.chatting.actions import tool_choices
from llmrun.cli.chatting.signals import Signals
from llmrun.cli.chatting.tool_call_view import call_rows, full_rows, result_row
from llmrun.cli.chatting.tool_turns import NOBODY_ASKED, REFUSED, ToolTurns, ask
from llmrun.engine.requests import ToolCall
from llmrun.engine.tools.tool import ToolInfo, ToolResult
from llmrun.engine.tools.toolbox import Toolbox
from tests.support.cli.chats import ListedTurns, session
from tests.support.tools.boxes import fake_server, opened, python_command

INFO = ToolInfo("echo", "fake", "echo", "Repeat a text.", {"type": "object"}, is_safe=False, why_not="")
HOSTILE = "\x1b[2J\x9b31m\u202e\u200b\U000e0041\r"
PROGRAM = python_command("import sys; print('ran', sys.argv[1])", "--a={a}")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path))


@dataclass
class Run:
    """The result of a call, the rows that were shown for it, and how many questions were asked."""

    result: str | None
    rows: list[str]
    questions: int


def ran(
    toolbox: Toolbox,
    monkeypatch: pytest.MonkeyPatch,
    *typed: str | None,
    name: str = "program",
    interactive: bool = True,
) -> Run:
    """Run a call. The answers in `typed` are typed at its questions."""
    rows: list[str] = []
    answers = iter(typed)
    asked = []

    def answer(question: str) -> str | None:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(tool_turns, "ask", answer)
    monkeypatch.setattr("llmrun.cli.chatting.tool_turns.out.reply", rows.extend)
    turns = ToolTurns(toolbox, ListedTurns([], interactive=interactive), Signals(lambda: None, lambda: None))
    return Run(turns._result(ToolCall("c", name, '{"a": "x"}')), rows, len(asked))


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["y"], True),
        (["YES"], True),
        (["n"], False),
        ([None], False),
        (["", "what?", "yess", "n"], False),
        (["s", "y"], True),
    ],
)
def test_an_unsafe_call_waits_for_the_user(
    typed: list[str | None], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(PROGRAM) as box:
        run = ran(box.toolbox, monkeypatch, *typed)
    assert run.result == ("ran --a=x\n" if runs else REFUSED)
    assert run.questions == len(typed)
    assert run.rows[0] == 'tool program {"a": "x"}'


def test_always_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(PROGRAM) as box:
        runs = [ran(box.toolbox, monkeypatch, *typed) for typed in (["a"], [], [])]
    assert [run.result for run in runs] == ["ran --a=x\n"] * 3


def test_a_safe_call_is_shown_and_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(python_command("print('yes')", is_safe=True)) as box:
        run = ran(box.toolbox, monkeypatch)
    assert run.result == "yes\n"
    assert run.rows[0] == 'tool program {"a": "x"}'
    assert run.rows[1].startswith("result: yes (4 characters, 0.")


def test_nothing_unsafe_runs_without_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(PROGRAM) as box:
        run = ran(box.toolbox, monkeypatch, interactive=False)
    assert run.result == NOBODY_ASKED
    assert run.rows[-1] == "not run: the call needs your confirmation"


def test_failures_are_results_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(python_command("import time; time.sleep(600)", timeout_s=0.2)) as box:
        run = ran(box.toolbox, monkeypatch, "y")
        assert run.result == "tool program: the command did not end within 0.2 s"
        assert run.rows[-1] == f"failed: {run.result}"
        unknown = ran(box.toolbox, monkeypatch, name=HOSTILE)
    assert unknown.result is not None
    assert "no such tool" in unknown.result
    assert all(row.isprintable() for row in unknown.rows)


def test_a_failed_validation_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(arguments: Any, schema: Any) -> str | None:
        raise LlmrunError("the checking process cannot be started", hint="free some memory")

    with opened(PROGRAM, validate=validate) as box:
        run = ran(box.toolbox, monkeypatch, "y")
    assert run.result == "the checking process cannot be started; free some memory"


def test_a_lost_mark_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(python_command("", is_safe=True)) as box:
        box.toolbox.unmark("program")
        run = ran(box.toolbox, monkeypatch, "n")
    assert "asking because the mark was removed in a chat" in run.rows


@pytest.mark.push
@given(st.dictionaries(st.text() | st.just(HOSTILE), st.text() | st.just(HOSTILE) | st.integers()), st.text())
def test_rows_show_the_exact_arguments(arguments: dict[str, Any], description: str) -> None:
    info = ToolInfo("echo", "a\nb", HOSTILE, description + HOSTILE, {HOSTILE: HOSTILE}, is_safe=False, why_not="")
    rows = full_rows(info, arguments)
    short, _ = call_rows(info, arguments)
    assert all(row.isprintable() for row in [*rows, *short])
    text = "".join(rows[: rows.index("description")])
    assert json.loads(text[text.index("{") :]) == arguments


def test_long_arguments_are_cut_and_say_so() -> None:
    many, complete = call_rows(INFO, {f"key {number}": "value" for number in range(100)})
    assert not complete
    assert (len(many), many[-1]) == (14, "  … 90 more lines")
    wide, complete = call_rows(INFO, {"text": "x" * 1000, "then": "rm -rf"})
    assert not complete
    assert wide[2].endswith("x… 713 more characters")
    assert wide[3] == '    "then": "rm -rf"'


def test_results_are_summed_up_in_one_row() -> None:
    result = ToolResult(f"\n  {HOSTILE}first\nsecond", is_error=True, truncated=True, seconds=1.25)
    row = result_row(result)
    assert row.isprintable()
    assert row.startswith("failed: \\u001b[2J")
    assert row.endswith("characters, cut, 1.2 s)")
    assert result_row(ToolResult("")) == "result: (no text) (0 characters, 0.0 s)"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a terminal: the user's and the program's."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import pty

    user, program = pty.openpty()
    yield user, program
    os.close(user)


def test_keys_typed_before_the_question_do_not_answer_it(terminal: tuple[int, int], monkeypatch: Any) -> None:
    user, program = terminal
    os.write(user, b"y\n")
    with os.fdopen(program, "rb") as stream:
        assert os.read(user, 3) == b"y\r\n"  # the echo shows that the keys have arrived
        monkeypatch.setattr("llmrun.cli.chatting.tool_turns.out.prompt", lambda text: os.write(user, b"n\n"))
        assert ask("run it? ", stream) == "n"


def test_the_end_of_input_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as stream:
        assert ask("run it? ", stream) is None


def test_a_question_that_nobody_sees_has_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("run it? ") is None
    assert "standard error is not a terminal" in capsys.readouterr().err


def test_tools_are_listed_with_their_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        opened(
            python_command("", is_safe=True), fake_server("echo"), fake_server("dies at start", name="broken")
        ) as box,
        session(tmp_path, toolbox=box.toolbox) as found,
    ):
        found.run("/tools")
    assert capsys.readouterr().err.splitlines() == [
        "program, runs without asking  Run a program.",
        "echo (server fake)  Repeat a text.",
        "server broken was left out: it ended: exit status 3: no such module: time",
    ]


def test_marks_change_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(fake_server("echo")) as box, session(tmp_path, toolbox=box.toolbox) as found:
        found.run("/tools allow echo")
        assert box.toolbox.describe("echo").is_safe
        assert ("ask echo", "ask before every call") in tool_choices(found.chat)
        found.run("/tools ask echo")
        assert not box.toolbox.describe("echo").is_safe
        assert ("allow echo", "run without asking") in tool_choices(found.chat)
        found.run("/tools echo", "/tools ecko")
    told = capsys.readouterr().err
    assert "  Repeat a text." in told
    assert "no such tool" in told


def test_a_chat_without_tools_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path) as found:
        found.run("/tools")
        assert tool_choices(found.chat) == []
    assert "error: /tools: this chat has no tools" in capsys.readouterr().err
