"""Tests of the sources of the prompt, and of what is refused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.parsing import read_prompt
from tests.support.cli.commands import LLMRUN, ROOT, scripted


class Stdin:
    """A stand-in for standard input with the given bytes; None is a terminal, which must never be read."""

    def __init__(self, data: bytes | None) -> None:
        self.buffer = io.BytesIO(data or b"")
        self.closed = False
        self._terminal = data is None

    def isatty(self) -> bool:
        return self._terminal


def prompt_of(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    option: str | None = None,
    file: Path | None = None,
    stdin: bytes | None = b"piped\n",
) -> str:
    monkeypatch.setattr(sys, "stdin", Stdin(stdin))
    return read_prompt(words, option, file)


def test_every_source_and_how_they_combine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("from a file\n")
    assert prompt_of(monkeypatch) == "piped"
    assert prompt_of(monkeypatch, "why", "is", "it") == "why is it"
    assert prompt_of(monkeypatch, option="why is it") == "why is it"
    assert prompt_of(monkeypatch, file=file) == "from a file"
    assert prompt_of(monkeypatch, "-") == "piped"
    assert prompt_of(monkeypatch, option="-") == "piped"
    assert prompt_of(monkeypatch, file=Path("-")) == "piped"
    assert prompt_of(monkeypatch, "in", "short:", "-") == "in short:\n\npiped"
    assert prompt_of(monkeypatch, "-", "in", "short") == "piped\n\nin short"
    assert prompt_of(monkeypatch, "in", "short:", file=file) == "in short:\n\nfrom a file"
    assert prompt_of(monkeypatch, "-", file=file) == "piped\n\nfrom a file"


@pytest.mark.parametrize(
    ("words", "option", "file", "stdin", "expected"),
    [
        ((), None, None, None, "no prompt given"),
        ((), None, None, b"", "the prompt is empty"),
        ((), None, None, b" \n\n", "the prompt is empty"),
        (("",), None, None, b"piped", "the prompt is empty"),
        ((), "", None, b"piped", "the prompt is empty"),
        (("a",), "b", None, b"", "the prompt was given twice"),
        (("-", "-"), None, None, b"", "standard input can be read only once"),
        (("-",), None, "-", b"", "standard input can be read only once"),
        ((), None, "/no/such/file", b"", "prompt: /no/such/file: No such file or directory"),
        ((), None, "/", b"", "prompt: /: Is a directory"),
        ((), None, None, b"caf\xe9", "standard input: not UTF-8: byte 0xe9 at offset 3"),
        ((), None, None, b"\xff\xfe", "standard input: not UTF-8: byte 0xff at offset 0"),
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


@pytest.mark.push
def test_a_prompt_given_leaves_standard_input_alone(tmp_path: Path) -> None:
    """A cron job's standard input may be a pipe that is never closed."""
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [*LLMRUN, "generate", "--backend", "scripted", "-q", "hello"],
            stdin=reading,
            capture_output=True,
            check=False,
            cwd=ROOT,
            timeout=60,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert (done.stdout, done.returncode) == (b"You said: hello\n", 0)


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
