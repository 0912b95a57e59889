"""Tests of input that is longer than a row: rows break between words, and the cursor is on its character."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import Application
from prompt_toolkit.application.current import set_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.input import DummyInput
from prompt_toolkit.layout import Layout
from prompt_toolkit.layout.containers import Window
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.mouse_handlers import MouseHandlers
from prompt_toolkit.layout.screen import Char, Screen, WritePosition
from prompt_toolkit.output import DummyOutput

from llmrun.cli.chatting.input_rows import WordWrappedControl, cells, row_starts

LINES = 6
TEXT = st.text("abcde     \u4f60\u597d\u3002\U0001f600e\u0301\t", max_size=120)


def rows(line: str, columns: int) -> list[str]:
    starts = [*row_starts(line, columns, columns), None]
    return [line[begin:end] for begin, end in pairwise(starts)]


def width(text: str) -> int:
    return sum(map(cells, text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", [""]),
        ("one two ", ["one two "]),
        ("one two three four ", ["one two ", "three ", "four "]),
        ("one sevenxx ", ["one ", "sevenxx "]),  # with the cursor behind it, the word would not fit
        ("eightxxx one ", ["eightxxx", " one "]),
        ("a elevenxxxxx b ", ["a ", "elevenxx", "xxx b "]),
        ("one       two ", ["one     ", "  two "]),
        ("\u4f60\u597d\u4e16\u754c\u3002\u4f60\u597d ", ["\u4f60\u597d\u4e16", "\u754c\u3002\u4f60", "\u597d "]),
        ("abc abce\u0301f ", ["abc ", "abce\u0301f "]),
        ("abcdefg\u4f60\u0301 ", ["abcdefg", "\u4f60\u0301 "]),
        ("abcdefg\U0001f600 ", ["abcdefg", "\U0001f600 "]),
    ],
)
def test_rows_of_eight_columns(line: str, expected: list[str]) -> None:
    assert rows(line, 8) == expected


@given(TEXT, st.integers(2, 20))
def test_rows_are_the_whole_line_and_fit(line: str, columns: int) -> None:
    found = rows(line, columns)
    assert "".join(found) == line
    assert all(width(row) <= columns for row in found)


@given(st.text("abc\u00e9  ", max_size=120), st.integers(2, 20))
def test_no_word_that_fits_is_split(line: str, columns: int) -> None:
    for begin in row_starts(line, columns, columns):
        before, behind = re.split(" ", line[:begin])[-1], re.split(" ", line[begin:])[0]
        assert not before or not behind or len(before + behind) > columns


class Edited(Buffer):
    def load_history_if_not_yet_loaded(self) -> None:
        """Do nothing. Prompts load the history in the background."""


def drawn(text: str, cursor: int, columns: int) -> tuple[Screen, str]:
    """Draw a prompt with a text. Return the screen, and the cell at the cursor."""
    window = Window(
        BufferControl(Edited(document=Document(text, cursor))),
        wrap_lines=True,
        get_line_prefix=lambda line, row: "  " if line or row else "> ",
    )
    window.content = WordWrappedControl(window)
    screen = Screen()
    position = WritePosition(0, 0, columns, LINES)
    with set_app(Application(Layout(window), input=DummyInput(), output=DummyOutput())):
        window.write_to_screen(screen, MouseHandlers(), position, "", erase_bg=False, z_index=None)
    at = screen.get_cursor_position(window)
    return screen, screen.data_buffer[at.y][at.x].char


def rows_of(screen: Screen, columns: int) -> list[str]:
    return ["".join(screen.data_buffer[y][x].char for x in range(columns)).rstrip() for y in range(LINES)]


def test_words_move_to_the_next_row_as_they_are_typed() -> None:
    assert rows_of(drawn("hello wor", 9, 13)[0], 13)[:2] == ["> hello wor", ""]
    assert rows_of(drawn("hello world", 11, 13)[0], 13)[:2] == ["> hello", "  world"]
    assert rows_of(drawn("hello world again\nnew", 0, 13)[0], 13)[:4] == ["> hello", "  world", "  again", "  new"]


@given(TEXT.map(lambda text: text.replace("c", "\n")), st.data(), st.integers(6, 30))
def test_the_cursor_is_on_its_character(text: str, data: st.DataObject, columns: int) -> None:
    """This holds even if the text has more rows than the window."""
    cursor = data.draw(st.integers(0, len(text)))
    while cursor < len(text) and not cells(text[cursor]):
        cursor += 1
    expected = text[cursor : cursor + 1].replace("\n", "") or " "
    screen, cell = drawn(text, cursor, columns)
    assert cell[:1] == Char(expected).char[:1]
    assert all(width("".join(row)) <= columns for row in rows_of(screen, columns))


@pytest.mark.parametrize("cursor", range(0, 72, 8))
def test_the_cursor_is_seen_in_the_first_column(cursor: int) -> None:
    _, cell = drawn("eight8 8" * 9, cursor, 10)
    assert cell == "e"


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_very_narrow_terminals_do_no_harm(columns: int) -> None:
    drawn("hello world", 11, columns)
