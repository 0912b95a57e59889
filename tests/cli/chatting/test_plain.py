"""Tests of turns from a pipe, and from a terminal that can only print."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.chatting.draft_images import SIGNS
from llmrun.cli.chatting.plain import Meter, PlainTurns
from tests.support.cli.chats import journals
from tests.support.cli.commands import on_terminal

METER = Meter(25, 100)


def turns_of(data: bytes) -> list[str]:
    turns = PlainTurns(io.BytesIO(data), interactive=False)
    read: list[str] = []
    while (turn := turns.read(METER)) is not None:
        read.append(turn)
    return read


@pytest.mark.parametrize(
    ("data", "turns"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n\ntwo\n", ["one", "", "two"]),
        (b"\xef\xbb\xbfone\r\ntwo\r\n", ["one", "two"]),
        (b'"""\none\n\n"""\ntwo', ['"""\none\n\n"""', "two"]),
        (b'/system """\none\n"""\n', ['/system """\none\n"""']),
        ("é\u2028é\n".encode(), ["é\u2028é"]),
        (b"a\x00b\n", ["a\x00b"]),
    ],
)
def test_lines_and_blocks_are_turns(data: bytes, turns: list[str]) -> None:
    assert turns_of(data) == turns


def test_characters_that_stand_for_images_are_replaced() -> None:
    assert turns_of(f"a {SIGNS[0]}{SIGNS[-1]} b\n".encode()) == ["a \ufffd\ufffd b"]


def test_utf_16_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="standard input: not UTF-8, but UTF-16"):
        turns_of("one\ntwo\n".encode("utf-16"))


def test_a_line_without_end_is_refused_after_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.cli.chatting.plain.LARGEST_TEXT", 1000)
    with pytest.raises(UsageError, match="line 1 is larger than"):
        turns_of(b"x" * 2000)
    with pytest.raises(UsageError, match="a block is larger than"):
        turns_of(b'"""\n' + b"x" * 100 + b"\n" * 2000)


@pytest.mark.push
def test_a_dumb_terminal_gets_prompts_and_no_escape_sequence(tmp_path: Path) -> None:
    process = on_terminal("chat", "--backend", "scripted", TERM="dumb", LLMRUN_DATA_DIR=str(tmp_path))
    process.expect_exact("/help lists the commands\r\n")
    process.expect_exact("0% > ")
    process.send(b'"""two\n')
    process.expect_exact("... ")
    process.send(b'lines"""\n')
    process.expect_exact("You said: two\r\nlines\r\n")
    process.expect_exact("% > ")
    process.send(b"/exti\n")
    process.expect_exact("did you mean /exit?")
    process.expect_exact("% > ")
    process.send(b"half a li")
    process.sendintr()
    process.expect_exact("% > ")
    process.send(b"still here\n")
    process.expect_exact("You said: still here\r\n")
    process.expect_exact("% > ")
    process.sendeof()
    rest = process.read()
    process.close()
    assert process.exitstatus == 0
    assert b"\x1b" not in rest
    assert len(journals(tmp_path)) == 1
