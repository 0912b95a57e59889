"""Tests of breaking text into rows, and of shortening rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from llmrun.cli.answers.markdown.rows import Row, cut, encoded, folded, ink, plain, shown, without_beginning, wrapped
from llmrun.cli.console.terminal import width

WORDS = st.sampled_from(["a", "word", "longer-words", " ", "  ", "日本", "語。", "😀", "e\u0301", "x" * 25, "🇩🇪"])
BOLD = Style(bold=True)
SEGMENTS = st.lists(st.tuples(WORDS, st.sampled_from([None, BOLD])), max_size=30).map(
    lambda parts: [Segment(text, style) for text, style in parts]
)
LIMITS = st.integers(2, 30)


def as_text(row: Row) -> Text:
    return Text.assemble(*((part.text, part.style or "") for part in row))


def styles(parts: list[Text]) -> list[tuple[str, bool]]:
    """Return every character but spaces, and whether it is bold."""
    bold = [{at for span in part.spans for at in range(span.start, span.end) if span.style} for part in parts]
    each = [
        (sign, at in marked) for part, marked in zip(parts, bold, strict=True) for at, sign in enumerate(part.plain)
    ]
    return [(sign, marked) for sign, marked in each if sign != " "]


@given(SEGMENTS, LIMITS)
def test_rows_fit_and_hold_every_character_but_blanks_at_their_ends(row: Row, limit: int) -> None:
    rows = [part.plain for part in wrapped(as_text(row), limit)]
    assert all(width(part) <= limit for part in rows)
    assert "".join(rows).replace(" ", "") == plain(row).replace(" ", "")


@given(SEGMENTS, LIMITS)
def test_folded_rows_fit_and_hold_everything(row: Row, limit: int) -> None:
    rows = list(folded(row, limit))
    assert all(width(plain(part)) <= limit for part in rows)
    assert "".join(map(plain, rows)) == plain(row)
    assert styles(list(map(as_text, rows))) == styles([as_text(row)])


@given(SEGMENTS, LIMITS)
def test_every_character_keeps_its_style(row: Row, limit: int) -> None:
    assert styles(list(wrapped(as_text(row), limit))) == styles([as_text(row)])


@pytest.mark.push
@given(SEGMENTS, SEGMENTS, LIMITS)
def test_text_that_grows_changes_no_row_but_the_last_two(row: Row, more: Row, limit: int) -> None:
    before = [part.plain for part in wrapped(as_text(row), limit)]
    after = [part.plain for part in wrapped(as_text([*row, *more]), limit)]
    assert after[: max(0, len(before) - 2)] == before[:-2]


def test_a_word_longer_than_a_row_begins_on_one_of_its_own() -> None:
    assert [row.plain for row in wrapped(Text("ab abcdefghijkl mn"), 5)] == ["ab", "abcde", "fghij", "kl mn"]


def test_closing_punctuation_does_not_begin_a_row() -> None:
    assert [row.plain for row in wrapped(Text("日本。語"), 4)] == ["日", "本。", "語"]


def test_a_row_is_one_line_of_text_and_our_attributes() -> None:
    row = [Segment("- ", Style(dim=True)), Segment("a\x1b[31m\n", BOLD), Segment("\x9b")]
    assert encoded(row, color=True) == "\x1b[2m- \x1b[0m\x1b[1ma␛[31m \x1b[0m<9B>"
    assert encoded(row, color=False) == "- a␛[31m <9B>"


@given(SEGMENTS, st.integers(0, 100))
def test_a_row_is_cut_anywhere(row: Row, at: int) -> None:
    first, rest = cut(row, at)
    assert plain(first) == plain(row)[:at]
    assert plain(first) + plain(rest) == plain(row)


@given(SEGMENTS, LIMITS, LIMITS, st.integers(0, 60))
def test_what_is_left_of_a_text_does_not_depend_on_its_width(row: Row, one: int, other: int, count: int) -> None:
    def left(limit: int) -> str:
        rows = [[Segment(part.plain)] for part in wrapped(as_text(row), limit)]
        return "".join(map(ink, without_beginning(rows, count))).strip("\n")

    assert left(one) == left(other) == ink(row).strip("\n")[count:]


def test_a_character_is_not_buried_under_marks() -> None:
    assert shown("a" + "\u0301" * 3) == "a" + "\u0301" * 3
    assert shown("a" + "\u0301" * 10 + "b") == "a" + "\u0301" * 8 + "<0301><0301>b"
    assert shown("ครั้งที่ กำลังทำ") == "ครั้งที่ กำลังทำ"
