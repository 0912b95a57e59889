"""Breaking text into rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.chatting.markdown.rows import Row, Spans, encoded, folded, ink, plain, shown, wrapped
from llmrun.cli.terminal import width

WORDS = st.sampled_from(["a", "word", "longer-words", " ", "  ", "日本", "語。", "😀", "e\u0301", "x" * 25, "🇩🇪"])
SPANS = st.lists(st.tuples(WORDS, st.sampled_from(["", "1"])), max_size=30).map(tuple)
LIMITS = st.integers(2, 30)


@given(SPANS, LIMITS)
def test_rows_fit_and_hold_every_character_but_blanks_at_their_ends(spans: Spans, limit: int) -> None:
    rows = wrapped(spans, limit)
    assert all(width(plain(row)) <= limit for row in rows)
    assert "".join(map(plain, rows)).replace(" ", "") == plain(spans).replace(" ", "")


@given(SPANS, LIMITS)
def test_folded_rows_fit_and_hold_everything(spans: Spans, limit: int) -> None:
    rows = folded(spans, limit)
    assert all(width(plain(row)) <= limit for row in rows)
    assert "".join(map(plain, rows)) == plain(spans)


@given(SPANS, LIMITS)
def test_every_character_keeps_its_style(spans: Spans, limit: int) -> None:
    def styles(parts: Spans) -> list[tuple[str, str]]:
        return [(character, style) for text, style in parts for character in text if character != " "]

    assert [pair for row in wrapped(spans, limit) for pair in styles(row)] == styles(spans)


@given(SPANS, SPANS, LIMITS)
def test_text_that_grows_changes_no_row_but_the_last_two(spans: Spans, more: Spans, limit: int) -> None:
    before = [plain(row) for row in wrapped(spans, limit)]
    after = [plain(row) for row in wrapped(spans + more, limit)]
    assert after[: max(0, len(before) - 2)] == before[:-2]


def test_a_word_longer_than_a_row_begins_on_one_of_its_own() -> None:
    assert [plain(row) for row in wrapped((("ab abcdefghijkl mn", ""),), 5)] == ["ab", "abcde", "fghij", "kl mn"]


def test_closing_punctuation_does_not_begin_a_row() -> None:
    assert [plain(row) for row in wrapped((("日本。語", ""),), 4)] == ["日", "本。", "語"]


def test_a_row_is_one_line_of_text_and_our_attributes() -> None:
    row = Row((("a\x1b[31m\n", "1"), ("\x9b", "")), (("- ", "2"),))
    assert encoded(row) == "\x1b[2m- \x1b[0m\x1b[1ma␛[31m \x1b[0m<9B>"


@given(st.text())
def test_weight_does_not_depend_on_the_width(text: str) -> None:
    spans: Spans = ((text.replace("\n", ""), ""),)
    if ink(text):
        assert sum(Row(row).weight for row in wrapped(spans, 7)) == sum(Row(row).weight for row in wrapped(spans, 70))


def test_a_character_is_not_buried_under_marks() -> None:
    assert shown("a" + "\u0301" * 3) == "a" + "\u0301" * 3
    assert shown("a" + "\u0301" * 10 + "b") == "a" + "\u0301" * 8 + "<0301><0301>b"
    assert shown("ครั้งที่ กำลังทำ") == "ครั้งที่ กำลังทำ"
