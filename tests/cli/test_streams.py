"""Tests of pipes, full disks, closed descriptors, terminals and Ctrl-C, with a real process on the scripted backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.support.cli import forking
from tests.support.cli.commands import (
    LLMRUN,
    ROOT,
    TIMEOUT_S,
    modes_of_a_new_terminal,
    on_terminal,
    screen_of,
    script_file,
    scripted,
    shell,
)

pytestmark = pytest.mark.push

GENERATE = "$LLMRUN generate --backend scripted"
LONG = "abcdefghij" * 500


def test_a_pipe_holds_no_escape_byte() -> None:
    done = scripted("-v", "--logprobs", "1", "hello")
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"\r" not in done.stdout + done.stderr


def test_control_characters_of_the_model_pass_through_a_pipe_unchanged(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "\x1b[31mred\x07\r\n")])
    assert scripted("-q", "-m", script, "hello").stdout == b"\x1b[31mred\x07\r\n\n"


def test_control_characters_of_the_model_are_shown_on_a_terminal(tmp_path: Path) -> None:
    """Tokens of the scripted backend are single bytes, so every sequence is split across several tokens."""
    script = script_file(tmp_path, [("assistant\n", "\x1b]52;c;aGk=\x07\x9b31m")])
    screen, code = screen_of("generate", "--backend", "scripted", "-q", "-m", script, "hello")
    assert (screen, code) == ("␛]52;c;aGk=␇<9B>31m\n", 0)


def test_a_reader_that_leaves_ends_the_run_at_once_and_in_silence(tmp_path: Path) -> None:
    """5,000 tokens of 50 ms would take four minutes. The line after the first is not even complete."""
    script = script_file(tmp_path, [("assistant\n", "abcdefghij\n" + LONG)], step_seconds=0.05)
    done = shell(f"{GENERATE} -m {script} hello | head -c 10")
    assert (done.returncode, done.stdout, done.stderr) == (141, b"abcdefghij", b"")


@pytest.mark.night
def test_lines_of_concurrent_answers_do_not_mix(tmp_path: Path) -> None:
    """Three processes write to one pipe, and then to one file."""
    lines = [letter * 40 for letter in "abcdefghijklmnopqrstuvwxyz"]
    script = script_file(tmp_path, [("assistant\n", "\n".join(lines))], step_seconds=0.001)
    together = f"echo one two three | xargs -n 1 -P 3 {GENERATE} -q -m {script}"
    expected = sorted(lines * 3)
    piped = shell(f"{together} | cat").stdout.decode().splitlines()
    assert sorted(piped) == expected
    assert piped != lines * 3  # the answers were written at the same time
    shell(f"{together} > {tmp_path}/answers")
    assert sorted((tmp_path / "answers").read_text().splitlines()) == expected


def test_a_reader_of_a_pipe_gets_each_line_when_it_is_complete(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "first\n" + "x" * 30)], step_seconds=0.1)
    process = subprocess.Popen(
        [*LLMRUN, "generate", "--backend", "scripted", "-q", "-m", script, "hello"], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout
    assert os.read(process.stdout.fileno(), 1000) == b"first\n"
    assert process.poll() is None
    assert process.communicate(timeout=60)[0] == b"x" * 30 + b"\n"


def test_words_are_not_broken_at_the_edge_of_a_terminal(tmp_path: Path) -> None:
    """Tokens of this model are single bytes, so every word arrives in pieces."""
    code = "print('a line of code that is wider than the terminal is')"
    answer = f"Several words, and awordthatiswiderthantheterminal.\n```\n{code}\n```\nThe words after the code."
    script = script_file(tmp_path, [("assistant\n", answer), ("hello", answer)])
    screen, exit_code = screen_of("generate", "--raw", "--backend", "scripted", "-q", "-m", script, "hello", columns=20)
    assert screen.splitlines() == [
        "Several words, and awordthatiswiderthantheterminal.",
        "```",
        code,
        "```",
        "The words after the",
        "code.",
    ]
    assert exit_code == 0
    piped = scripted("-q", "-m", script, "hello", env=os.environ | {"COLUMNS": "20"})
    assert piped.stdout.decode() == answer + "\n"


def test_a_word_is_on_the_terminal_as_soon_as_it_is_complete(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "one two " + "three " * 200)], step_seconds=0.02)
    process = on_terminal("generate", "--backend", "scripted", "-m", script, "hello", NO_COLOR="1")
    process.expect_exact("one")
    began = time.monotonic()
    process.expect_exact("two three")
    assert time.monotonic() - began < 5  # the whole answer takes 24 s
    process.sendintr()
    process.read()


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", ["--help", "generate --help", "--version"])
def test_help_into_a_closed_pipe_is_silent(arguments: str) -> None:
    done = shell(f"(sleep 1; exec $LLMRUN {arguments}) | true")
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", [f"{GENERATE} hello", f"{GENERATE} --json hello", "$LLMRUN --help"])
def test_a_full_disk_is_one_line_and_code_1(command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert done.stderr == b"error: cannot write to standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", [f"{GENERATE} hello", "$LLMRUN --version"])
def test_a_closed_stdout_is_one_line_and_code_1(command: str) -> None:
    done = shell(f"{command} >&-")
    assert done.stderr.startswith(b"error: standard output is closed\n")
    assert done.returncode == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(exec true)"])
def test_a_stderr_that_cannot_be_written_does_not_cost_the_answer(redirection: str) -> None:
    done = shell(f"{GENERATE} hello {redirection}")
    assert (done.returncode, done.stdout) == (0, b"You said: hello\n")


def test_an_empty_environment_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "is_enabled", False)  # it matters only when Python starts
    done = scripted("-q", "hellö ✓", env={})
    assert (done.stdout.decode(), done.stderr, done.returncode) == ("You said: hellö ✓\n", b"", 0)


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1", "no_SUCH.locale"])
def test_output_is_utf_8_whatever_the_locale_says(locale: str) -> None:
    env = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}
    done = scripted("-q", stdin="hellö ✓".encode(), env=env)
    assert (done.stdout.decode(), done.returncode) == ("You said: hellö ✓\n", 0)


@pytest.mark.night
def test_a_home_that_cannot_be_written_will_do() -> None:
    env = {"HOME": "/dev/null", "PATH": os.environ["PATH"]}
    done = scripted("-q", "hello", env=env)
    assert (done.stdout, done.stderr, done.returncode) == (b"You said: hello\n", b"", 0)


@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb"])
def test_a_terminal_that_wants_no_color_gets_none(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    for arguments in (["hello"], ["--top-k", "x", "hello"]):
        screen, _ = screen_of("generate", "--backend", "scripted", *arguments)
        assert "\x1b" not in screen


def test_a_terminal_gets_color_on_stderr_and_a_pipe_beside_it_none(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    screen, code = screen_of("generate", "--backend", "scripted", "hello")
    assert screen.startswith("You said: hello\n\x1b[2m")
    assert code == 0
    answer = tmp_path / "answer"
    process = pexpect.spawn(
        "bash", ["-c", f"{' '.join(LLMRUN)} generate --backend scripted hello > {answer}"], cwd=str(ROOT)
    )
    assert b"\x1b[2m" in process.read()
    assert answer.read_bytes() == b"You said: hello\n"


@pytest.mark.parametrize("columns", [80, 50, 40])
def test_the_statistics_are_one_line_of_a_terminal_and_verbose_shows_all(columns: int) -> None:
    run = ("generate", "--stats", "--backend", "scripted", "-m", "a-name-of-a-model-that-is-long", "hello")
    screen, _ = screen_of(*run, columns=columns, NO_COLOR="1")
    line = screen.splitlines()[1:]
    assert len(line) == 1
    assert len(line[0]) <= columns
    assert " out " in line[0]
    assert "seed" in line[0]
    verbose, _ = screen_of(*run, "-v", columns=columns, NO_COLOR="1")
    assert "TPOT" in verbose
    assert "ctx" in verbose


@pytest.mark.parametrize(("flags", "setting"), [(["--no-stream"], "on"), ([], "off")], ids=["flag", "setting"])
def test_an_answer_that_is_not_streamed_comes_when_it_is_whole(tmp_path: Path, flags: list[str], setting: str) -> None:
    script = script_file(tmp_path, [("assistant\n", "first line\nsecond line" + "." * 40)], step_seconds=0.02)
    run = ("generate", "--backend", "scripted", "-m", script, *flags, "hello")
    process = on_terminal(*run, NO_COLOR="1", LLMRUN_STREAM=setting)
    process.expect("answering  \\d s")
    assert b"first" not in process.before
    process.expect_exact("first line\r\nsecond line" + "." * 40)
    assert " tokens in " in process.read().decode()


def test_ctrl_c_shows_what_there_is_of_an_answer_that_is_not_streamed(tmp_path: Path) -> None:
    run = ("generate", "--backend", "scripted", "-m", slow_script(tmp_path), "--no-stream", "hello")
    process = on_terminal(*run, NO_COLOR="1")
    process.expect("answering  \\d s")
    process.sendintr()
    rest = process.read().decode()
    process.close()
    assert process.exitstatus == 130
    assert "abc" in rest


def test_no_prompt_on_a_terminal_says_what_to_type() -> None:
    screen, code = screen_of("generate", NO_COLOR="1")
    assert screen == 'error: no prompt given\nhint: llmrun generate "Why is the sky blue?"\n'
    assert code == 2


def slow_script(folder: Path) -> str:
    return script_file(folder, [("assistant\n", LONG)], step_seconds=0.02)


def test_ctrl_c_ends_the_answer_keeps_the_text_and_still_reports(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import termios

    process = on_terminal("generate", "--backend", "scripted", "-m", slow_script(tmp_path), "hello", NO_COLOR="1")
    modes = modes_of_a_new_terminal()
    process.expect_exact("abcdefghij")
    process.sendintr()
    rest = process.read().decode()
    assert termios.tcgetattr(process.child_fd) == modes
    process.close()
    assert process.exitstatus == 130
    answer, *lines = rest.replace("\r\n", "\n").replace("\x03", "").splitlines()
    assert answer in LONG
    assert lines[-1].startswith("stopped after ")
    assert "stopped" in lines[-1]
    assert "Traceback" not in rest


@pytest.mark.night
def test_ctrl_c_discards_no_output_of_a_slow_terminal(tmp_path: Path) -> None:
    """By default, Ctrl-C would discard what was written after the terminal's buffer became full."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import fcntl
    import termios

    script = script_file(tmp_path, [("hello", LONG * 20)])
    process = on_terminal("generate", "--raw", "--backend", "scripted", "-q", "-m", script, "hello", columns=200)
    while int.from_bytes(fcntl.ioctl(process.child_fd, termios.FIONREAD, bytes(4)), sys.byteorder) < 4000:
        assert process.isalive()
        time.sleep(0.05)
    time.sleep(1.0)
    process.sendintr()
    rest = process.read().decode().replace("\r\n", "").replace("\x03", "")
    process.close()
    assert process.exitstatus == 130
    assert len(rest) > 4000
    assert rest in LONG * 20


def test_ctrl_c_discards_what_was_typed(tmp_path: Path) -> None:
    """A line typed during the answer must not become the next command of a shell."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    command = f"{' '.join(LLMRUN)} generate --backend scripted -q -m {slow_script(tmp_path)} hello"
    program = f"stty -echo; {command}; read -t 1 line; echo the next line: $line."
    process = pexpect.spawn("bash", ["-c", program], cwd=str(ROOT), timeout=TIMEOUT_S)
    process.expect_exact("abcdefghij")
    process.send("rm\r")
    time.sleep(0.2)
    process.sendintr()
    process.expect_exact("the next line: .")
    process.close()


def test_ctrl_c_in_json_still_gives_the_body(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*LLMRUN, "generate", "--backend", "scripted", "--json", "-v", "-m", slow_script(tmp_path), "hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    assert process.stderr
    while not process.stderr.readline().startswith(b"sampling"):  # the last line before the answer
        assert process.poll() is None
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b'"finish_reason": "cancelled"' in stdout
    assert b"Traceback" not in stderr


def test_sigterm_ends_the_answer_with_its_own_code(tmp_path: Path) -> None:
    process = on_terminal("generate", "--backend", "scripted", "-m", slow_script(tmp_path), "hello", NO_COLOR="1")
    process.expect_exact("abcdefghij")
    process.kill(signal.SIGTERM)
    assert "stopped after " in process.read().decode()
    process.close()
    assert process.exitstatus == 143


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path: Path) -> None:
    """The user must not be trapped when cancelling hangs, so the handler's `cancel` does nothing here."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    program = """
import signal, sys, time
from llmrun.cli.answers.answering import cancelling
with cancelling(lambda: None):
    print("ready", flush=True)
    time.sleep(100)
    time.sleep(100)
"""
    process = pexpect.spawn(sys.executable, ["-c", program], cwd=str(ROOT), timeout=30)
    process.expect_exact("ready")
    process.sendintr()
    signals = 1
    while process.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=0.5):  # two pending signals of one kind are merged
        process.sendintr()
        signals += 1
        assert signals < 100
    assert signals > 1
    process.close()
    assert process.exitstatus == 130


def test_ctrl_c_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "abcdefghij" * 10)], step_seconds=0.02)
    done = shell(f"trap '' INT; {GENERATE} -q -m {script} hello & sleep 1.5; kill -INT $!; wait $!; (exit $?)")
    assert done.stdout == b"abcdefghij" * 10 + b"\n"
