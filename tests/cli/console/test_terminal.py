"""Tests of what may be shown, and of what a stream can show."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.console.terminal import can_color, can_move_cursor, is_terminal, shortened, visible, visible_line, width

EMBEDDINGS = "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc"


@given(st.text())
def test_visible_text_holds_no_control_character_but_newline_and_tab(text: str) -> None:
    assert not [c for c in visible(text) if is_control(c) and c not in "\n\t"]


@given(st.text())
def test_a_visible_line_is_one_line(text: str) -> None:
    assert not any(map(is_control, visible_line(text)))


@given(st.text(), st.text())
def test_a_sequence_split_over_two_tokens_is_shown_the_same(head: str, tail: str) -> None:
    assert visible(head) + visible(tail) == visible(head + tail)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters=EMBEDDINGS)))
def test_text_without_control_characters_is_left_alone(text: str) -> None:
    assert visible(text) == text


def test_control_characters_become_pictures_of_themselves() -> None:
    assert visible("\x1b[31m\x07\x00\x7f\r\n\tä\x9b") == "␛[31m␇␀␡␍\n\tä<9B>"


@pytest.mark.parametrize(
    ("environment", "choice", "pipe", "terminal"),
    [
        ({}, "auto", False, True),
        ({"TERM": "dumb"}, "auto", False, False),
        ({"NO_COLOR": "1"}, "auto", False, False),
        ({"NO_COLOR": ""}, "auto", False, True),
        ({"FORCE_COLOR": "1"}, "auto", True, True),
        ({"FORCE_COLOR": "0"}, "auto", False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, "always", False, False),
        ({"FORCE_COLOR": "1"}, "never", False, False),
        ({}, "always", True, True),
        ({}, "never", False, False),
    ],
)
def test_color_is_decided_for_each_stream_by_itself(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], choice: str, pipe: bool, terminal: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert can_color(io.StringIO(), choice) is pipe
    assert can_color(Terminal(), choice) is terminal


def test_a_dumb_terminal_is_a_terminal_whose_cursor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert is_terminal(Terminal())
    assert not can_move_cursor(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert can_move_cursor(Terminal())
    assert not can_move_cursor(io.StringIO())


@given(st.text(), st.integers(0, 20))
def test_a_shortened_line_fits_and_is_as_long_as_can_be(text: str, limit: int) -> None:
    line = shortened(text, limit)
    assert text.startswith(line)
    assert width(line) <= limit
    assert line == text or width(text[: len(line) + 1]) > limit


def test_width_knows_wide_and_combining_characters() -> None:
    assert [width(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]


def test_width_is_the_most_that_any_terminal_takes_for_an_emoji_of_several_characters() -> None:
    assert [width(text) for text in ("👩\u200d🚀", "❤\ufe0f", "🇩🇪", "a\u200bb", "\u00ad")] == [4, 2, 4, 2, 1]


def test_what_shows_text_in_another_order_or_breaks_lines_is_shown_by_number() -> None:
    assert visible("a\u202eb\u2066c\u2028d\u2029") == "a<202E>b<2066>c<2028>d<2029>"
    assert visible("שלום\u200f!") == "שלום\u200f!"
