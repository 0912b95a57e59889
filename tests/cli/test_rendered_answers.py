"""Tests of `generate` on a terminal, which renders Markdown, and of the cases in which it prints the text as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli.commands import (
    LLMRUN,
    TIMEOUT_S,
    modes_of_a_new_terminal,
    on_terminal,
    screen_of,
    script_file,
    scripted,
)
from tests.support.cli.terminals import Terminal
from tests.support.engine.thinking_models import ENDED, SWITCHED, TURN

pytestmark = pytest.mark.push

ANSWER = "# Sky\n\nIt is **blue**.\n\n- `one`\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |"
GENERATE = ("generate", "--backend", "scripted", "-q")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return script_file(tmp_path, [("assistant\n", ANSWER), ("Show it.", ANSWER)])


def rows(written: str, columns: int = 100) -> list[str]:
    terminal = Terminal(columns)
    terminal.write(written)
    return terminal.rows()


@pytest.mark.parametrize("columns", [100, 30])
def test_a_terminal_gets_rendered_markdown(model: str, columns: int) -> None:
    written, code = screen_of(*GENERATE, "-m", model, "Show it.", columns=columns)
    shown = "\n".join(rows(written, columns))
    assert code == 0
    assert shown.startswith("Sky\n\nIt is blue.\n\n")
    assert not {"#", "*", "`", "|"} & set(shown)
    assert "\x1b[1m" in written


def test_without_color_markdown_is_still_rendered(model: str) -> None:
    written, _ = screen_of(*GENERATE, "-m", model, "Show it.", NO_COLOR="1")
    assert rows(written)[:3] == ["# Sky", "", "It is **blue**."]  # as in a chat, because nothing else shows the style
    assert "|---|" not in written
    assert "\x1b[1m" not in written


@pytest.mark.parametrize(
    ("flags", "end"),
    [(["--raw"], ""), (["--logprobs", "0"], "\n"), (["--regex", r"(.|\n)*"], ""), (["--samples", "2"], "\n")],
)
def test_some_answers_are_never_rendered(model: str, flags: list[str], end: str) -> None:
    written, _ = screen_of(*GENERATE, *flags, "-m", model, "Show it.")
    assert ANSWER + end in written


def test_json_is_never_rendered(model: str) -> None:
    written, _ = screen_of(*GENERATE, "--json", "-m", model, "Show it.")
    assert "It is **blue**" in written


def test_a_dumb_terminal_gets_plain_text(model: str) -> None:
    written, _ = screen_of(*GENERATE, "-m", model, "Show it.", TERM="dumb")
    assert written == ANSWER + "\n"


def test_a_pipe_gets_the_bytes_of_the_answer(model: str) -> None:
    assert scripted("-q", "-m", model, "Show it.").stdout == ANSWER.encode() + b"\n"


def test_the_kind_of_stderr_does_not_matter(model: str, tmp_path: Path) -> None:
    """Only stdout decides, in both directions."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import pexpect

    run, piped = " ".join([*LLMRUN, *GENERATE, "-m", model, "'Show it.'"]), tmp_path / "piped"
    shown = pexpect.run(f'bash -c "{run} 2>{tmp_path / "stderr"}"', timeout=TIMEOUT_S, env=None).decode()
    assert rows(shown.replace("\r\n", "\n"), 80)[:3] == ["Sky", "", "It is blue."]
    pexpect.run(f'bash -c "{run} >{piped}"', timeout=TIMEOUT_S)
    assert piped.read_text() == ANSWER + "\n"


def test_pipes_do_not_load_the_renderer(model: str) -> None:
    program = """
import sys
from llmrun.__main__ import main
try:
    main()
finally:
    print([name for name in ("rich", "markdown_it") if name in sys.modules], file=sys.stderr)
"""
    command = [sys.executable, "-c", program, *GENERATE, "-m", model, "Show it."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.stdout, done.stderr) == (ANSWER + "\n", "[]\n")


def test_ctrl_c_keeps_the_rendered_text_and_restores_the_terminal(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import termios

    script = script_file(tmp_path, [("assistant\n", "**one** two\n\nthree " + "four " * 500)], step_seconds=0.02)
    process = on_terminal(*GENERATE, "-m", script, "Show it.")
    modes = modes_of_a_new_terminal()
    written: bytes = process.expect_exact(b"four") * b"" + process.before + process.after
    process.send("typed\n")  # not echoed, because the cursor must stay where it is
    written += process.read_nonblocking(100_000, timeout=TIMEOUT_S)
    process.sendintr()
    written += process.read()
    assert termios.tcgetattr(process.child_fd) == modes
    process.close()
    assert process.exitstatus == 130
    shown = rows(written.decode().replace("\r\n", "\n"))
    assert shown[:2] == ["one two", ""]
    assert shown[2].startswith("three four")
    assert "typed" not in "\n".join(shown)


def test_an_answer_that_is_not_streamed_is_rendered(model: str) -> None:
    written, _ = screen_of(*GENERATE, "--no-stream", "-m", model, "Show it.")
    assert rows(written)[:3] == ["Sky", "", "It is blue."]


def test_thinking_ends_before_the_rendered_answer(tmp_path: Path) -> None:
    """The last line of the thinking must not be overwritten when rows are redrawn."""
    script = script_file(tmp_path, [(TURN, f"<think>\nhm{ENDED}It is **blue**.")], chat_template=SWITCHED)
    written, _ = screen_of("generate", "--backend", "scripted", "-m", script, "Show it.")
    assert rows(written)[:3] == ["hm", "", "It is blue."]
