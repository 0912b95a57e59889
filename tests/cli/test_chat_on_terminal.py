"""Tests of `llmrun chat` on a terminal, from its first prompt to the shell's, with the scripted backend."""

from __future__ import annotations

import base64
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

import termios

from llmrun.cli.chatting.store import read_conversation
from tests.support.cli.chats import chat, events_in, journals
from tests.support.cli.commands import ROOT, TIMEOUT_S, modes_of_a_new_terminal, on_terminal, script_file

pytestmark = pytest.mark.push

LONG = "abcdefghi " * 500
PROMPT = r"\x1b\[\?2004h(?:\x1b\[\?1l)?\x1b\[\?25l"  # the prompt is drawn (bracketed paste mode alone starts earlier)


@contextmanager
def chatting(data: Path, *arguments: str) -> Iterator[pexpect.spawn[bytes]]:
    """Yield a chat at its first prompt; afterwards, check that the terminal's modes are restored."""
    process = on_terminal("chat", "--backend", "scripted", *arguments, LLMRUN_DATA_DIR=str(data), NO_COLOR="1")
    before = modes_of_a_new_terminal()
    process.expect_exact("/help lists the commands")
    process.expect(PROMPT)
    assert termios.tcgetattr(process.child_fd) != before
    yield process
    process.expect(pexpect.EOF)
    assert termios.tcgetattr(process.child_fd) == before
    process.close()


def ask(process: pexpect.spawn[bytes], turn: str, answer: str) -> None:
    process.send(f"{turn}\r")
    process.expect_exact(answer)
    process.expect(r"tokens? in ")
    process.expect(PROMPT)


def until(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_questions_commands_and_the_end_of_input(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "one", "You said: one")
        process.send("/undo\r")
        process.expect_exact("undone: one")
        ask(process, "\x1b[F and two", "You said: one and two")
        process.send("/exti\r")
        process.expect_exact("did you mean /exit?")
        process.expect(PROMPT)
        process.send("\x04")
    assert process.exitstatus == 0
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.question for one in conversation.exchanges] == ["one and two"]


def test_undo_twice_takes_two_turns_back(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        ask(process, "one", "You said: one")
        ask(process, "two", "You said: two")
        for question in ("two", "one"):
            process.send("/undo\r")
            process.expect_exact(f"undone: {question}")
            process.expect(PROMPT)
        ask(process, "", "You said: one")
        process.send("/exit\r")
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.question for one in conversation.exchanges] == ["one"]


def test_edit_opens_the_editor_on_a_terminal_as_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nstty -a < /dev/tty > "$0.modes"\nread line < /dev/tty\necho "$line" >> "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    with chatting(tmp_path) as process:
        ask(process, "one", "You said: one")
        process.send("/edit\r")
        until(lambda: (tmp_path / "editor.modes").exists() and bool((tmp_path / "editor.modes").read_text()))
        process.send("two\n")
        process.expect_exact("> one\r\n> two\r\n")
        process.expect_exact("You said: one")
        process.expect(PROMPT)
        process.send("/exit\r")
    modes = (tmp_path / "editor.modes").read_text().replace(";", " ").split()
    assert {"icanon", "echo", "icrnl"} <= set(modes)
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.question for one in conversation.exchanges] == ["one", "one\ntwo"]


def test_ctrl_c_in_the_editor_does_not_stop_the_next_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\ntrap "" INT\necho ready\nread line < /dev/tty\necho two > "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    with chatting(tmp_path) as process:
        process.send("/edit\r")
        process.expect_exact("ready")
        process.sendintr()
        process.send("\n")
        process.expect_exact("You said: two")
        process.expect(PROMPT)
        process.send("/exit\r")
    assert process.exitstatus == 0


def test_copy_asks_the_terminal_where_nothing_else_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WAYLAND_DISPLAY", "DISPLAY", "TMUX"):
        monkeypatch.delenv(variable, raising=False)
    with chatting(tmp_path) as process:
        ask(process, "one", "You said: one")
        process.send("/copy\r")
        process.expect_exact(f"\x1b]52;c;{base64.b64encode(b'You said: one').decode()}\x07")
        process.expect_exact("the last answer was copied to the terminal's clipboard")
        process.expect(PROMPT)
        process.send("/exit\r")


@pytest.mark.night
def test_another_model_answers_and_is_there_when_the_chat_continues(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "I am another")])
    with chatting(tmp_path) as process:
        ask(process, "one", "You said: one")
        process.send("/model missing.json\r")
        process.expect_exact("stays in use")
        process.expect(PROMPT)
        process.send(f"/model {script}\r")
        process.expect_exact("answers from here on")
        process.expect(PROMPT)
        ask(process, "two", "I am another")
        process.send("/exit\r")
    with chatting(tmp_path, "--continue") as process:
        ask(process, "three", "I am another")
        process.send("/exit\r")


def test_exit_says_goodbye_with_code_0(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        process.send("/bye\r")
    assert process.exitstatus == 0


@pytest.mark.night
def test_ctrl_c_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """The interruptions come between the question and the next prompt, some of them in pairs."""
    chance = random.Random(5)
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.005)
    with chatting(tmp_path, script) as process:
        for turn in range(12):
            process.send(f"question {turn}\r")
            time.sleep(chance.uniform(0, 0.2))
            for _ in range(chance.choice([1, 1, 2, 5])):
                process.sendintr()
                time.sleep(chance.choice([0, 0.01]))
            process.expect(r"tokens? in |was removed")
            process.expect(PROMPT)
            process.send("\x03")  # a question that was removed stands at the prompt
        process.send("/exit\r")
    assert process.exitstatus == 0
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert conversation.exchanges
    for exchange in conversation.exchanges:
        assert LONG.startswith(exchange.answer)
        assert exchange.ended is not None
        assert exchange.ended.reason == "cancelled"


TYPED = "gr\u00fc\u00dfe und w\u00f6rter " * 600  # 12,600 bytes, three times what a terminal driver queues
PASTED = "".join(f"line {number} of a paste\n" for number in range(500))


@pytest.mark.parametrize(
    ("keys", "question"),
    [(TYPED, TYPED.rstrip()), (f"\x1b[200~{PASTED}\x1b[201~", PASTED.rstrip())],
    ids=["typed", "pasted"],
)
def test_ctrl_c_stops_an_answer_however_much_was_typed(tmp_path: Path, keys: str, question: str) -> None:
    """The answer would take 25 s. Everything typed meanwhile appears in the next prompt."""
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.005, context_size=32768)
    with chatting(tmp_path, script) as process:
        process.send("one\r")
        process.expect_exact("abcdefghi")
        process.send(keys)
        began = time.monotonic()
        process.sendintr()
        process.expect(r"tokens? in ")
        took = time.monotonic() - began
        process.expect(PROMPT)
        process.send("\r")
        process.expect_exact("abcdefghi")
        process.sendintr()
        process.expect(r"tokens? in ")
        process.expect(PROMPT)
        process.send("\x04")
    assert took < 2.0  # 0.1 s on an idle machine
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert [one.question for one in conversation.exchanges] == ["one", question]
    assert all(one.ended and one.ended.reason == "cancelled" for one in conversation.exchanges)


@pytest.mark.night
def test_what_is_typed_while_the_model_loads_stands_in_the_first_prompt(tmp_path: Path) -> None:
    """The model is a named pipe, so loading lasts until the writer closes it."""
    model = tmp_path / "model.json"
    os.mkfifo(model)
    process = on_terminal("chat", "--backend", "scripted", str(model), LLMRUN_DATA_DIR=str(tmp_path), NO_COLOR="1")
    before = modes_of_a_new_terminal()
    process.delaybeforesend = None
    while termios.tcgetattr(process.child_fd) == before:
        time.sleep(0.01)
    process.send("typed early " + "x" * 5000)
    with model.open("w") as script:
        script.write('{"answers": [["assistant\\n", "answered"]]}')
        script.flush()
        time.sleep(2)  # by now the chat opens it
    process.expect_exact("/help lists the commands")
    assert b"typed" not in process.before
    assert b"xx" not in process.before
    process.expect(PROMPT)
    process.send("\r")
    process.expect(r"tokens? in ")
    process.expect(PROMPT)
    process.send("\x04")
    process.expect(pexpect.EOF)
    assert termios.tcgetattr(process.child_fd) == before
    process.close()
    assert read_conversation(journals(tmp_path)[0]).conversation.exchanges[0].question == "typed early " + "x" * 5000


def test_ctrl_c_while_the_model_loads_leaves_and_restores_the_terminal(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    os.mkfifo(model)
    process = on_terminal("chat", "--backend", "scripted", str(model), LLMRUN_DATA_DIR=str(tmp_path), NO_COLOR="1")
    before = modes_of_a_new_terminal()
    while termios.tcgetattr(process.child_fd) == before:
        time.sleep(0.01)
    process.send("x" * 9000)
    process.sendintr()
    process.expect(pexpect.EOF)
    assert termios.tcgetattr(process.child_fd) == before
    process.close()
    assert process.exitstatus == 130
    assert not journals(tmp_path)


def test_ctrl_c_together_with_enter_stops_the_answer(tmp_path: Path) -> None:
    """The prompt is still in raw mode when Ctrl-C arrives, so it comes as a key press that must be looked for.

    The answer would take 25 s.
    """
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.005)
    with chatting(tmp_path, script) as process:
        process.send("one\r\x03")
        process.expect(r"tokens? in |was removed")
        process.expect(PROMPT)
        process.send("\x03/exit\r")
    conversation = read_conversation(journals(tmp_path)[0]).conversation
    assert all(one.ended and one.ended.reason == "cancelled" for one in conversation.exchanges)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["TERM", "HUP"])
def test_a_signal_that_ends_programs_restores_the_terminal(tmp_path: Path, number: int, code: int) -> None:
    with chatting(tmp_path) as process:
        process.send("half")
        process.expect_exact("alf")
        process.kill(number)
    assert process.exitstatus == code
    script = script_file(tmp_path, [("assistant\n", LONG)], step_seconds=0.005)
    with chatting(tmp_path, script) as process:
        process.send("one\r")
        process.expect_exact("abcdefghi")
        process.kill(number)
    assert process.exitstatus == code
    assert events_in(journals(tmp_path)[0])[-1]["reason"] == "cancelled"


def test_an_answer_goes_to_a_pipe_while_the_turns_come_from_a_terminal(tmp_path: Path) -> None:
    """Each stream is checked separately, so the answers contain no prompt, statistics or escape sequences."""
    answers = tmp_path / "answers"
    process = pexpect.spawn(
        "bash",
        ["-c", f'exec "$0" -m llmrun chat --backend scripted > {answers}', sys.executable],
        cwd=str(ROOT),
        env={**os.environ, "TERM": "xterm-256color", "LLMRUN_DATA_DIR": str(tmp_path)},
        timeout=TIMEOUT_S,
    )
    process.expect(PROMPT)
    ask(process, "one", "")
    ask(process, "two", "")
    process.send("/exit\r")
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0
    assert answers.read_bytes() == b"You said: one\nYou said: two\n"


@pytest.mark.night
def test_an_answer_that_is_not_streamed_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    answer = "# Title\n\nSome words."
    script = script_file(tmp_path, [("assistant\n", answer + " " * 40)], step_seconds=0.02)
    with chatting(tmp_path, script, "--no-stream") as process:
        process.send("one\r")
        process.expect(r"answering  \d s")
        assert b"Title" not in process.before
        process.expect_exact("# Title\r\n\r\nSome words.\r\n")
        process.expect(r"tokens? in ")
        process.expect(PROMPT)
        process.send("/exit\r")
    assert read_conversation(journals(tmp_path)[0]).conversation.exchanges[0].answer.startswith(answer)


def test_the_share_of_the_context_is_shown_once(tmp_path: Path) -> None:
    with chatting(tmp_path) as process:
        process.send("one\r")
        process.expect(r"tokens? in ")
        assert b"ctx" not in process.before
        process.expect(PROMPT)
        process.expect_exact("of 8,19")  # the last column is written separately
        process.send("/exit\r")


@pytest.mark.night
def test_continuing_shows_the_last_turn_but_not_in_a_pipe(tmp_path: Path) -> None:
    chat(tmp_path, turns="one\ntwo\n")
    done = chat(tmp_path, "--continue", turns="")
    assert b"two" not in done.stderr
    with chatting(tmp_path, "--continue") as process:
        rows = process.before.decode().replace("\r\n", "\n").splitlines()
        assert rows[1:4] == ["> two", "You said: two", "/show conversation shows all of it"]
        process.send("/bye\r")
