"""Tests of the live line, and of keeping stdout and stderr apart."""

from __future__ import annotations

import io
import sys

import pytest

from llmrun.cli.console import output
from llmrun.cli.console.output import Output, hanging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(output, "time", clock)
    return clock


def use(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO, stderr: io.StringIO) -> Output:
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    return Output()


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stderr = Terminal()
    out = use(monkeypatch, Terminal(), stderr)
    out.progress("prefill 1/2")
    clock.now += 0.1
    out.progress("prefill 2/2")
    out.answer("hello")
    assert stderr.getvalue() == ""


def test_a_line_may_appear_at_once(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stderr = Terminal()
    out = use(monkeypatch, Terminal(), stderr)
    out.progress("loading", at_once=True)
    assert stderr.getvalue() == "\rloading"
    log = io.StringIO()
    use(monkeypatch, Terminal(), log).progress("loading", at_once=True)
    assert log.getvalue() == ""


def test_the_living_line_is_erased_before_anything_else_is_written(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    stderr = Terminal()
    out = use(monkeypatch, Terminal(), stderr)
    out.progress("prefill 1/2")
    clock.now += 1
    out.progress("prefill 2/2\x1b[2J")
    clock.now += 1
    out.progress("日本")
    out.answer("hello")
    drawn = ["prefill 2/2␛[2J", "日本" + " " * 11, " " * 6, ""]
    assert stderr.getvalue() == "\r" + "\r".join(drawn)


def test_the_living_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stderr = Terminal()
    out = use(monkeypatch, Terminal(), stderr)
    out.progress("x" * 500)
    clock.now += 1
    out.progress("x" * 500)
    assert len(stderr.getvalue()) == 40


def test_a_log_gets_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stderr = io.StringIO()
    out = use(monkeypatch, io.StringIO(), stderr)
    for second in range(26):
        out.progress(f"compiling kernels  {second}/30")
        clock.now += 1
    out.answer("hello")
    assert stderr.getvalue() == "compiling kernels  10/30\ncompiling kernels  20/30\n"


def test_quiet_leaves_errors_alone_on_stderr(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stderr = io.StringIO()
    out = use(monkeypatch, io.StringIO(), stderr)
    out.quiet = out.verbose = True
    out.note("note")
    out.detail("detail")
    out.fields(["field"])
    for _ in range(3):
        out.progress("progress")
        clock.now += 60
    assert stderr.getvalue() == ""
    out.error("what: where: why", "try this")
    assert stderr.getvalue() == "error: what: where: why\nhint: try this\n"


def test_an_error_stays_one_line_whatever_it_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    use(monkeypatch, io.StringIO(), stderr).error("bad key: a\nb\x1b[31m\r")
    assert stderr.getvalue() == "error: bad key: a b␛[31m␍\n"


def test_an_error_after_half_an_answer_starts_on_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = Terminal(), Terminal()
    out = use(monkeypatch, stdout, stderr)
    out.answer("half")
    out.error("broken")
    assert (stdout.getvalue(), stderr.getvalue()) == ("half\n", "error: broken\n")


def test_fields_are_one_line_in_a_log_and_wrap_between_fields_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = ["a" * 18, "b" * 18, "c" * 18]
    stderr = io.StringIO()
    use(monkeypatch, io.StringIO(), stderr).fields(fields)
    assert stderr.getvalue() == "  ".join(fields) + "\n"
    stderr = Terminal()
    use(monkeypatch, io.StringIO(), stderr).fields(fields)
    assert stderr.getvalue() == f"{fields[0]}  {fields[1]}\n{fields[2]}\n"


def test_only_the_terminal_shows_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdout, expected in ((io.StringIO(), "\x1b[2J\n"), (Terminal(), "␛[2J\n")):
        out = use(monkeypatch, stdout, io.StringIO())
        out.answer("\x1b[2J")
        out.end_answer()
        assert stdout.getvalue() == expected


def test_marked_lines_are_highlighted_where_there_is_color(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = Terminal(), Terminal()
    out = use(monkeypatch, stdout, stderr)
    line = [("a \x1b", False), ("b\n", True), (" c", False)]
    out.lines_marked([line])
    assert stdout.getvalue() == "a ␛b  c\n"
    monkeypatch.delenv("NO_COLOR")
    out.reply_marked([line])
    assert stderr.getvalue() == "a ␛\x1b[1;31mb \x1b[0m c\n"


def test_notes_wrap_at_words_on_a_terminal_and_stay_whole_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the first words fill most of the row, qwen3:8b follows"
    stderr = Terminal()
    use(monkeypatch, io.StringIO(), stderr).note(text)
    assert stderr.getvalue() == "note: the first words fill most of the\nrow, qwen3:8b follows\n"
    log = io.StringIO()
    use(monkeypatch, io.StringIO(), log).note(text)
    assert log.getvalue() == f"note: {text}\n"


def test_a_command_in_a_hint_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "/usr/bin/python3 -m pip install a-package and-another"
    stderr = Terminal()
    use(monkeypatch, io.StringIO(), stderr).error("it is not installed", f"install it: {command}")
    assert stderr.getvalue() == f"error: it is not installed\nhint: install it:\n  {command}\n"


def test_replies_wrap_below_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    use(monkeypatch, io.StringIO(), stderr).reply(["model       a-model of 135 million parameters"])
    assert stderr.getvalue() == "model       a-model of 135 million\n            parameters\n"


def test_a_line_under_a_label_wraps_under_its_text() -> None:
    line = "for   4,096 tokens of context (-c), a prompt of 512 (-p)"
    assert hanging(line, 40) == ["for   4,096 tokens of context (-c), a", "      prompt of 512 (-p)"]
    assert hanging(line, 80) == [line]
