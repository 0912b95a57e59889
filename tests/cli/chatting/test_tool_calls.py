"""Tests that every tool call is shown, that unsafe ones wait for the user, and that hostile text stays harmless."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import Cancelled, LlmrunError, UsageError
from llmrun.cli.chatting.tool_call_view import call_rows, full_rows, result_row
from llmrun.cli.chatting.tool_turns import NOBODY_ASKED, REFUSED, ToolCalls, ask, tool_choices, tools
from llmrun.engine.tools.tool import ToolInfo, ToolResult
from llmrun.engine.tools.toolbox import Toolbox
from tests.support.tools.boxes import fake_server, opened, python_command

INFO = ToolInfo("echo", "fake", "echo", "Repeat a text.", {"type": "object"}, is_safe=False, why_not="")
HOSTILE = "\x1b[2J\x9b31m\u202e\u200b\U000e0041\r"
PROGRAM = python_command("import sys; print('ran', sys.argv[1])", "--a={a}")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path))


class Screen:
    """Records what is shown, and types prepared answers."""

    def __init__(self, *typed: str | None) -> None:
        self.rows: list[str] = []
        self.questions = 0
        self._typed = list(typed)

    def show(self, rows: Sequence[str]) -> None:
        self.rows += rows

    def ask(self, question: str) -> str | None:
        self.questions += 1
        return self._typed.pop(0)


def ran(toolbox: Toolbox, screen: Screen, ask: Callable[[str], str | None] | None) -> ToolResult:
    return ToolCalls(toolbox, ask, screen.show).run("program", {"a": "x"}, lambda: False)


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["y"], True),
        (["YES "], True),
        (["n"], False),
        ([None], False),
        (["", "what?", "yess", "n"], False),
        (["s", "y"], True),
    ],
)
def test_an_unsafe_call_waits_for_the_user(typed: list[str | None], runs: bool) -> None:
    screen = Screen(*typed)
    with opened(PROGRAM) as box:
        result = ran(box.toolbox, screen, screen.ask)
    assert result.text == ("ran --a=x\n" if runs else REFUSED)
    assert result.is_error is not runs
    assert screen.questions == len(typed)
    assert screen.rows[0] == 'tool program {"a": "x"}'


def test_always_is_asked_once() -> None:
    screen = Screen("a")
    with opened(PROGRAM) as box:
        for _ in range(3):
            assert ran(box.toolbox, screen, screen.ask).text == "ran --a=x\n"
    assert screen.questions == 1


def test_a_safe_call_is_shown_and_not_asked_about() -> None:
    screen = Screen()
    with opened(python_command("print('yes')", is_safe=True)) as box:
        assert ran(box.toolbox, screen, screen.ask).text == "yes\n"
    assert screen.rows[0] == 'tool program {"a": "x"}'
    assert screen.rows[1].startswith("result: yes (4 characters, 0.")


def test_nothing_unsafe_runs_without_a_user() -> None:
    screen = Screen()
    with opened(PROGRAM) as box:
        assert ran(box.toolbox, screen, None) == ToolResult(NOBODY_ASKED, is_error=True)


def test_failures_are_results_for_the_model() -> None:
    screen = Screen("y")
    with opened(python_command("import time; time.sleep(600)", timeout_s=0.2)) as box:
        result = ran(box.toolbox, screen, screen.ask)
        assert result == ToolResult("tool program: the command did not end within 0.2 s", is_error=True)
        unknown = ToolCalls(box.toolbox, screen.ask, screen.show).run(HOSTILE, {}, lambda: False)
    assert unknown.is_error
    assert "no such tool" in unknown.text
    assert all(row.isprintable() for row in screen.rows)


def test_a_failed_validation_is_a_result() -> None:
    def validate(arguments: Any, schema: Any) -> str | None:
        raise LlmrunError("the checking process cannot be started", hint="free some memory")

    screen = Screen("y")
    with opened(PROGRAM, validate=validate) as box:
        result = ran(box.toolbox, screen, screen.ask)
    assert result == ToolResult("the checking process cannot be started; free some memory", is_error=True)


def test_a_cancelled_call_has_no_result() -> None:
    with opened(python_command("import time; time.sleep(600)", is_safe=True)) as box, pytest.raises(Cancelled):
        ToolCalls(box.toolbox, None, Screen().show).run("program", {}, lambda: True)


def test_a_lost_mark_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen("n")
    with opened(python_command("", is_safe=True)) as box:
        box.toolbox.unmark("program")
        ran(box.toolbox, screen, screen.ask)
    assert "asking because its mark was removed in a chat" in screen.rows


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


class FakeChat:
    """A chat that records its replies."""

    def __init__(self, toolbox: Toolbox | None) -> None:
        self.toolbox = toolbox
        self.rows: list[str] = []

    def reply(self, lines: Iterable[str]) -> None:
        self.rows += lines

    def confirm(self, line: str) -> None:
        self.rows.append(line)


def test_tools_are_listed_with_their_permission() -> None:
    with opened(
        python_command("", is_safe=True), fake_server("echo"), fake_server("dies at start", name="broken")
    ) as box:
        chat = FakeChat(box.toolbox)
        tools(chat, "")
    assert chat.rows == [
        "program, runs without asking  Run a program.",
        "echo (server fake)  Repeat a text.",
        "server broken was left out: it ended: exit status 3: no such module: time",
    ]


def test_marks_change_with_the_command() -> None:
    with opened(fake_server("echo")) as box:
        chat = FakeChat(box.toolbox)
        tools(chat, "allow echo")
        assert box.toolbox.describe("echo").is_safe
        assert ("ask echo", "ask before every call") in tool_choices(chat)
        tools(chat, "ask echo")
        assert not box.toolbox.describe("echo").is_safe
        assert ("allow echo", "run without asking") in tool_choices(chat)
        tools(chat, "echo")
        assert "  Repeat a text." in chat.rows
        with pytest.raises(UsageError, match="no such tool"):
            tools(chat, "ecko")


def test_a_chat_without_tools_says_so() -> None:
    chat = FakeChat(None)
    with pytest.raises(UsageError, match="has no tools"):
        tools(chat, "")
    assert tool_choices(chat) == []
