"""Tests of filling in the variables of a preset's prompts, and of the values that -P gives."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.cli.arguments import prompts
from llmrun.cli.arguments.prompts import Prompts, check_params, filled_system, parse_params, read_prompt
from llmrun.options.presets import Preset
from llmrun.options.settings import Settings
from tests.support.cli.commands import LLMRUN, ROOT, scripted, shell


def settings(prompt: str | None, system: str | None = None, **defaults: str) -> Settings:
    """Return the settings of a run with a preset."""
    values = {} if system is None else {"system": system}
    return Settings(system=system, preset=Preset("t", "m", values, prompt=prompt, defaults=defaults))


def test_variables_are_replaced_once_and_dollars_can_be_written() -> None:
    found = settings("$$5: ${a}s, $input", "As $b", b="3")
    assert found.preset is not None
    assert found.preset.params == ["a", "b"]
    assert Prompts.of(found, {"a": "$input"}).filled("$a ${b} $$") == ("$5: $inputs, $a ${b} $$", "As 3")
    assert Prompts.of(found, {"a": "y", "b": "z"}).filled("x") == ("$5: ys, x", "As z")


@pytest.mark.parametrize(
    ("texts", "asked", "prompt", "system"),
    [
        (("Summarize:",), "a text", "Summarize:\n\na text", None),
        (("Tell a joke.",), "", "Tell a joke.", None),
        (("$input", "Be brief."), "a text", "a text", "Be brief."),
        (("Go.", "About $input"), "a text", "Go.", "About a text"),
    ],
)
def test_what_is_asked_has_a_place(texts: tuple[str, ...], asked: str, prompt: str, system: str | None) -> None:
    assert Prompts.of(settings(*texts), {}).filled(asked) == (prompt, system)


def test_input_is_needed_unless_the_prompt_is_whole() -> None:
    assert Prompts.of(settings("On $input"), {}).needs_input
    assert Prompts.of(Settings(), {}).needs_input
    assert not Prompts.of(settings("Tell a joke."), {}).needs_input


def test_only_the_texts_of_a_preset_with_a_prompt_have_variables() -> None:
    """A system prompt from a flag, the environment or another preset may contain any dollar sign."""
    assert Prompts.of(Settings(), {}).filled("$x $") == ("$x $", None)
    assert Prompts.of(settings(None, "$5"), {}).filled("$x") == ("$x", "$5")
    assert Prompts.of(settings("$input", "$a"), {}, "$5").filled("x") == ("x", "$5")
    assert Prompts.of(Settings(system="$5", preset=settings("$input", "$a").preset), {}).filled("x") == ("x", "$5")


def test_all_missing_variables_are_named() -> None:
    found = settings("$a $b $c", "$d", b="x")
    with pytest.raises(UsageError, match=re.escape("preset t: no value for $c, $d")) as refused:
        Prompts.of(found, {"a": ""}).check_complete()
    assert refused.value.hint == "-P c=... -P d=..."
    Prompts.of(found, {"a": "1", "c": "2", "d": "3"}).check_complete()


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("langage", "--param: langage: preset t has no such variable", "did you mean language?"),
        ("input", "--param: input: this variable is the prompt itself", "give the value as the prompt"),
    ],
)
def test_values_for_no_variable_are_refused(name: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        check_params([name], settings("$language $input").preset)
    assert refused.value.hint == hint


def test_parameters_are_pairs() -> None:
    assert parse_params(["a=b=c", "d=", "a=e"]) == {"a": "e", "d": ""}
    for wrong in ("a", "=b", "1=b", "é=b", "a b=c"):
        with pytest.raises(UsageError, match="is not NAME=VALUE"):
            parse_params([wrong])


@pytest.mark.parametrize("preset", [None, settings(None).preset])
def test_parameters_need_a_preset_with_a_prompt(preset: Preset | None) -> None:
    check_params([], preset)
    with pytest.raises(UsageError, match="--param: requires a preset with a prompt"):
        check_params(["a"], preset)


def test_a_chat_has_a_system_prompt_and_no_input() -> None:
    assert filled_system(settings("$x", "As $a"), {"a": "b"}) == "As b"
    assert filled_system(Settings(system="$5"), {}) == "$5"
    assert filled_system(Settings(), {}) is None
    with pytest.raises(UsageError, match=r"preset t: no value for \$a"):
        filled_system(settings("$x", "As $a"), {})
    with pytest.raises(UsageError, match=r"preset t: system: \$input works only in generate and batch"):
        filled_system(settings("$x", "About $input"), {})


class Terminal(io.StringIO):
    """A stand-in for a terminal, which must never be read."""

    def isatty(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        raise AssertionError


def piped(data: bytes) -> TextIO:
    """Return a pipe that contains the data, which must fit in the pipe's buffer."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        stream.write(data)
    return os.fdopen(reading, encoding="utf-8")


def prompt_of(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    option: str | None = None,
    file: Path | None = None,
    stdin: bytes | TextIO | None = b"piped\n",
    **how: bool,
) -> str:
    """Return the prompt if standard input is a pipe with these bytes, a stream, or a terminal (None)."""
    with Terminal() if stdin is None else piped(stdin) if isinstance(stdin, bytes) else stdin as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        return read_prompt(words, option, file, **how)


def test_every_source_and_how_they_combine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("from a file\n")
    assert prompt_of(monkeypatch) == "piped"
    assert prompt_of(monkeypatch, "why", "is", "it") == "why is it\n\npiped"
    assert prompt_of(monkeypatch, option="why is it") == "why is it\n\npiped"
    assert prompt_of(monkeypatch, file=file) == "from a file\n\npiped"
    assert prompt_of(monkeypatch, "why", file=file) == "why\n\nfrom a file\n\npiped"
    assert prompt_of(monkeypatch, "-") == "piped"
    assert prompt_of(monkeypatch, option="-") == "piped"
    assert prompt_of(monkeypatch, file=Path("-")) == "piped"
    assert prompt_of(monkeypatch, "in", "short:", "-") == "in short:\n\npiped"
    assert prompt_of(monkeypatch, "-", "in", "short") == "piped\n\nin short"
    assert prompt_of(monkeypatch, "-", file=file) == "piped\n\nfrom a file"
    assert prompt_of(monkeypatch, "in", "short:", file=file, stdin=None) == "in short:\n\nfrom a file"


def test_only_pipes_and_files_follow_the_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sockets of sshd and of editors may never be closed, and /dev/null means that there is no input."""
    file, (ours, theirs) = tmp_path / "file.txt", socket.socketpair()
    file.write_text("piped\n")
    theirs.sendall(b"piped\n")
    with ours, theirs:
        for stdin, prompt in (
            (file.open(encoding="utf-8"), "why\n\npiped"),
            (piped(b"\n"), "why"),
            (piped(b""), "why"),
            (os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8"), "why"),
            (os.fdopen(os.dup(ours.fileno()), encoding="utf-8"), "why"),
            (None, "why"),
        ):
            assert prompt_of(monkeypatch, "why", stdin=stdin) == prompt
    closed = piped(b"")
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed)
    assert read_prompt(["why"], None, None) == "why"


def test_no_stdin_leaves_standard_input_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_of(monkeypatch, "why", no_stdin=True) == "why"
    assert prompt_of(monkeypatch, required=False, no_stdin=True) == ""
    with pytest.raises(UsageError, match="no prompt given"):
        prompt_of(monkeypatch, no_stdin=True)
    for words, file in ((["-"], None), (["why"], Path("-"))):
        with pytest.raises(UsageError, match="--no-stdin: cannot be combined with -"):
            prompt_of(monkeypatch, *words, file=file, no_stdin=True)


def test_exact_prompts_get_nothing_that_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors that fill in the middle start processes with open pipes."""
    assert prompt_of(monkeypatch, "def f():\n", exact=True) == "def f():\n"
    assert prompt_of(monkeypatch, "-", exact=True) == "piped\n"
    assert prompt_of(monkeypatch, exact=True) == "piped\n"


def test_piped_text_follows_a_whole_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_of(monkeypatch, required=False) == "piped"
    assert prompt_of(monkeypatch, required=False, stdin=b"") == ""
    assert prompt_of(monkeypatch, required=False, stdin=None) == ""


@pytest.mark.parametrize(
    ("words", "option", "file", "stdin", "expected"),
    [
        ((), None, None, None, "no prompt given"),
        ((), None, None, b"", "the prompt is empty"),
        ((), None, None, b" \n\n", "the prompt is empty"),
        (("",), None, None, b"", "the prompt is empty"),
        ((), "", None, b"", "the prompt is empty"),
        (("why",), None, None, b"caf\xe9", "standard input: not UTF-8: byte 0xe9 at offset 3"),
        (("a",), "b", None, b"", "the prompt was given twice"),
        (("-", "-"), None, None, b"", "standard input can be read only once"),
        (("-",), None, "-", b"", "standard input can be read only once"),
        ((), None, "/no/such/file", b"", "prompt: /no/such/file: No such file or directory"),
        ((), None, "/", b"", "prompt: /: Is a directory"),
        ((), None, None, b"caf\xe9", "standard input: not UTF-8: byte 0xe9 at offset 3"),
        ((), None, None, b"\xff\xfd", "standard input: not UTF-8: byte 0xff at offset 0"),
        ((), None, None, "Hello".encode("utf-16"), "standard input: not UTF-8, but UTF-16"),
        (("caf\udce9",), None, None, b"", "prompt: not UTF-8: byte 0xe9 after 3 characters"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    option: str | None,
    file: str | None,
    stdin: bytes | None,
    expected: str,
) -> None:
    with pytest.raises(UsageError) as refused:
        prompt_of(monkeypatch, *words, option=option, file=Path(file) if file else None, stdin=stdin)
    assert expected in str(refused.value)


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="/dev/zero: more than 64 MiB"):
        prompt_of(monkeypatch, file=Path("/dev/zero"))


@pytest.mark.push
def test_piped_text_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as large:
        large.truncate(prompts.LARGEST_TEXT + 1)
    with pytest.raises(UsageError, match="standard input: more than 64 MiB"):
        prompt_of(monkeypatch, "why", stdin=(tmp_path / "large").open(encoding="utf-8"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_piped_text_arrives_as_it_is_but_for_one_last_newline(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not text.strip() or text.startswith("\ufeff") or text.endswith(("\r", "\n")):
            text = "a" + text + "b"
        assert prompt_of(monkeypatch, stdin=text.encode() + b"\n") == text
        assert prompt_of(monkeypatch, stdin=b"\xef\xbb\xbf" + text.encode() + b"\r\n") == text


@pytest.mark.push
def test_a_prompt_with_a_nul_byte_is_a_prompt() -> None:
    done = scripted("-q", stdin=b"a\0b")
    assert (done.stdout, done.stderr, done.returncode) == (b"You said: a\0b\n", b"", 0)


@pytest.mark.push
def test_bytes_that_are_no_text_in_an_argument_are_refused() -> None:
    done = scripted(b"caf\xe9")
    assert done.stderr == b"error: prompt: not UTF-8: byte 0xe9 after 3 characters\n"
    assert done.returncode == 2


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """Start `generate` with an open pipe as its standard input."""
    command = [*LLMRUN, "generate", "--backend", "scripted", *arguments]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=ROOT)


@pytest.mark.push
def test_waiting_for_a_silent_pipe_is_reported_once() -> None:
    process = started("hello")
    assert process.stderr is not None
    assert process.stderr.readline() == (
        b"note: waiting for text on standard input; to continue without it, use --no-stdin or < /dev/null\n"
    )
    time.sleep(1.5)
    out, err = process.communicate(b"late\n", timeout=60)
    assert (out, process.returncode) == (b"You said: hello\n\nlate\n", 0)
    assert b"waiting" not in err


@pytest.mark.push
@pytest.mark.parametrize(
    ("flags", "expected"), [(["--no-stdin"], (0, b"You said: hello\n")), (["--suffix", "x"], (2, b""))], ids=str
)
def test_a_pipe_that_is_never_closed_need_not_be_read(flags: list[str], expected: tuple[int, bytes]) -> None:
    """The scripted model cannot fill in the middle, which is found out after the prompt has been read."""
    process = started("-q", "hello", *flags)
    code = process.wait(timeout=60)
    assert (code, process.communicate()[0]) == expected


@pytest.mark.push
def test_ctrl_c_ends_the_wait_for_a_pipe() -> None:
    process = started("hello")
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"note: waiting for text")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.push
def test_a_loop_over_lines_needs_no_stdin() -> None:
    """Without --no-stdin, the first answer would contain the other lines of the file."""
    loop = 'while read line; do $LLMRUN generate --backend scripted -q {} "$line"; done'
    assert shell(f"printf 'a\\nb\\n' | {loop.format('')}").stdout == b"You said: a\n\nb\n"
    assert shell(f"printf 'a\\nb\\n' | {loop.format('--no-stdin')}").stdout == b"You said: a\nYou said: b\n"


@pytest.mark.push
def test_the_rest_of_a_file_is_used_with_a_note(tmp_path: Path) -> None:
    """Loops such as `while read line; do llmrun generate "$line"; done < FILE` lose the other lines."""
    lines = tmp_path / "lines.txt"
    lines.write_text("a\nb\n")
    loop = f'while read line; do $LLMRUN generate --backend scripted {{}} "$line"; done < {lines}'
    done = shell(loop.format(""))
    assert done.stdout == b"You said: a\n\nb\n"
    assert (
        b"note: the prompt ends with 1 line from standard input; --no-stdin leaves standard input unread" in done.stderr
    )
    assert b"note:" not in shell(loop.format("--no-stdin")).stderr
    assert b"note:" not in shell(f"$LLMRUN generate --backend scripted x < {lines}").stderr


@pytest.mark.push
def test_a_closed_standard_input_is_an_empty_one() -> None:
    for prompt, code in ((["hello"], 0), ([], 2)):
        done = subprocess.run(
            ["bash", "-c", '"$@" <&-', "bash", *LLMRUN, "generate", "--backend", "scripted", *prompt],
            capture_output=True,
            check=False,
            cwd=ROOT,
            timeout=60,
        )
        assert done.returncode == code
