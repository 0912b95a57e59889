"""Tests of when pieces of a text are written, with known pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.console.flow import WholeLines, WordWrap, atomic_writes, reader_is_gone
from llmrun.cli.console.terminal import width


def wrapped(text: str, limit: int, size: int = 1) -> list[str]:
    """Return the rows of a text that arrives in pieces of `size` characters."""
    flow = WordWrap(lambda: limit)
    pieces = [flow.passed(text[at : at + size]) for at in range(0, len(text), size)]
    return ("".join(pieces) + flow.rest()).split("\n")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("one two three", ["one two", "three"]),
        ("12345678 12345678", ["12345678", "12345678"]),
        ("1 345678901 x", ["1", "345678901", "x"]),
        ("  12 456  ", ["  12 456  "]),
        ("a\n\n  bcd efgh", ["a", "", "  bcd efgh"]),
        ("a\tbc", ["a\tbc"]),
        ("a\tbcd", ["a", "bcd"]),
        ("ab 1234567890123 c d", ["ab 1234567890123 c d"]),
        ("日本語のテキスト。", ["日本語のテ", "キスト。"]),
        ("```\na b c d e f g h\n```\na b c d e f", ["```", "a b c d e f g h", "```", "a b c d e", "f"]),
        (
            "~~~~ py\n~~~\na b c d e f g h\n~~~~\na b c d e f",
            ["~~~~ py", "~~~", "a b c d e f g h", "~~~~", "a b c d e", "f"],
        ),
        ("```a``` b c d e", ["```a``` b c", "d e"]),
    ],
)
def test_lines_break_at_blanks_and_code_and_long_words_do_not(text: str, rows: list[str], size: int) -> None:
    limit = 11 if text.startswith("```a") else 10
    assert wrapped(text, limit, size) == rows


def test_only_the_word_being_written_is_held() -> None:
    flow = WordWrap(lambda: 10)
    assert [flow.passed(piece) for piece in ("on", "e t", "wo", " ", "123456789012", "34", " ", "x\n")] == [
        "",
        "one",
        "",
        " two",
        " 123456789012",
        "34",
        "",
        " x\n",
    ]


@given(st.lists(st.text("ab 日`~\t\n")), st.integers(2, 12))
def test_wrapping_changes_nothing_but_blanks(pieces: list[str], limit: int) -> None:
    flow = WordWrap(lambda: limit)
    written = "".join([flow.passed(piece) for piece in pieces]) + flow.rest()
    assert written.split() == "".join(pieces).split() or "日" in written
    assert "".join(written.split()) == "".join("".join(pieces).split())


@given(st.text("abc "), st.integers(4, 12))
def test_no_row_of_short_words_is_wider_than_the_terminal(text: str, limit: int) -> None:
    short = " ".join(word[:4] for word in text.split())
    assert all(width(row) <= limit for row in wrapped(short, limit))


def test_lines_are_held_until_they_are_complete() -> None:
    flow = WholeLines()
    pieces = ["a", "b\nc", "", "d\n\ne", "f"]
    assert [*map(flow.passed, pieces), flow.rest(), flow.rest()] == ["", "ab\n", "", "cd\n\n", "", "ef", ""]


def test_each_write_ends_a_line_and_is_atomic_where_it_can_be() -> None:
    text = "".join(f"{'ä' * (number % 300)}\n" for number in range(600)) + "x" * 9000 + "\n" + "end"
    writes = list(atomic_writes(text))
    assert "".join(writes) == text
    assert all(write.endswith("\n") for write in writes[:-1])
    sizes = [len(write.encode()) for write in writes]
    assert sum(size > 4096 for size in sizes) == 1
    assert max(sizes) == 9001


def test_a_pipe_without_readers_is_noticed(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as pipe:
        assert not reader_is_gone(pipe)
        os.close(ours)
        assert reader_is_gone(pipe)
    with (tmp_path / "file").open("w") as file:
        assert not reader_is_gone(file)
