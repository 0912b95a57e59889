"""Answers on a terminal, while they stream and when they are over."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.cli.chatting.markdown import MarkdownView
from llmrun.cli.chatting.markdown.pending import Pending
from llmrun.cli.chatting.markdown.rows import columns_of
from llmrun.cli.terminal import visible
from tests.support.cli.reflowing import ReflowingTerminal
from tests.support.cli.terminals import Terminal

pytestmark = pytest.mark.slow

PROSE = "The quick brown fox jumps over the lazy dog, and **boldly** so, with `code_in_it` and *no* regret at all. "
SAMPLE = """\
# A title

Some *emphasised* and **strong** text with `code`, a [link](https://example.com/a_b) and snake_case_names.
A second line of it, where 5 * 3 = 15.

- one item that is longer than a narrow terminal is wide
- two
  - nested
    1. deeper

10. ten
11. eleven
    ```python
    def hello(name):
        '''Say
        hello.'''
        return f"hello {name}"  # done
    ```

> A quote
> of two lines.

| Name | Value |
|:-----|------:|
| alpha | 1 |
| beta | 22 |

```
plain   code, with    blanks
```
---
日本語のテキストは空白がないので、どこでも改行できるはずです。 The end.
"""
PIECES = [
    *("word ", "a", "b ", "*", "**", "_", "`", "``", "```", "```python\n", "\n", "\n\n", "- ", "  - ", "1. ", "2. "),
    *("# ", "> ", "---", "***", "|", "| a | b |\n", "|---|:-:|\n", "a | b\n", "-|-\n", "[", "]", "(", ")", "!["),
    *("](http://x.y/z)", "<", "<http://a.b>", "&amp;", "&#27;", "\\", "\\(", "~~", "~~~\n", "    ", "   ", "\t"),
    *("\r\n", "\r", "snake_case ", "words in prose that go on and on, to fill a row. ", "日本語のテキスト。"),
    *("e\u0301", "😀", "🇩🇪", "x" * 30, '"""', "# c", "/* ", " */", "'", "+ ", "\u2028", "\x1b[31m", "\x9b"),
    *("&", "!", "=", "===\n", "<b>", "0123456789", " ", "0"),
]


class Answer:
    """An answer on a terminal. `pause`: seconds between two pieces; with one second, every piece is drawn."""

    def __init__(self, terminal: Terminal | ReflowingTerminal, *, color: bool = False, pause: float = 1.0) -> None:
        self._now = 0.0
        self._pause = pause
        self._view = MarkdownView(color=color, write=terminal.write, size=terminal.size, clock=lambda: self._now)

    def add(self, *pieces: str) -> None:
        for piece in pieces:
            self._now += self._pause
            self._view.text(piece)

    def end(self) -> None:
        self._view.end()


def shown(pieces: Sequence[str], *, columns: int = 100, lines: int = 30, color: bool = False) -> Terminal:
    """A whole answer, every piece of it drawn, on a terminal of its own."""
    terminal = Terminal(columns, lines)
    answer = Answer(terminal, color=color)
    answer.add(*pieces)
    answer.end()
    return terminal


def rows(text: str, columns: int = 100) -> list[str]:
    return shown([text], columns=columns, color=True).rows()


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and its pieces: cut anywhere."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=60)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text))))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.sampled_from([100, 40, 20, 12, 11]), st.sampled_from([30, 8]), st.booleans())
@settings(max_examples=100)
def test_a_text_looks_the_same_whatever_the_tokens_it_came_in(
    text: tuple[str, list[str]], columns: int, lines: int, color: bool
) -> None:
    whole, pieces = text
    streamed = shown(pieces, columns=columns, lines=lines, color=color)
    at_once = shown([whole], columns=columns, lines=lines, color=color)
    assert streamed.cells() == at_once.cells()
    assert streamed.modes() == at_once.modes()


@pytest.mark.parametrize(
    "text",
    [
        "1.\n0.",  # a paragraph that becomes the next item
        "-\n\n--",  # an item that becomes a paragraph, and takes the blank row along
        "# |b\n-|-",  # a heading that a table must not swallow
        "f\n<|\n--a",  # a table that becomes text again
        "text\n***bold***",  # a rule that becomes text
        "text\n```a` b",  # a fence that becomes text
        "_some words that go on and on and on_b",  # an emphasis that was none
        "=a![``/*10. # ```](http://x.y/z)long words and more of them ``",  # an image that becomes code
        "a | b and more words to fill the row until it is full\n-|-\n1 | 2",
        "```\ncode\n``\n```x\n```\n",
    ],
)
@pytest.mark.parametrize("columns", [100, 13])
def test_what_turns_out_to_be_something_else_looks_as_if_it_had_been_that_from_the_start(
    text: str, columns: int
) -> None:
    assert shown(list(text), columns=columns).cells() == shown([text], columns=columns).cells()


@pytest.mark.parametrize("columns", [100, 40, 20])
@pytest.mark.parametrize("lines", [30, 6])
def test_a_long_answer_looks_the_same_token_by_token(columns: int, lines: int) -> None:
    text = PROSE * 30 + "\n\n" + SAMPLE + "\n\n" + "日本語のテキスト。" * 100 + "\n\n" + "- an item\n" * 60
    source = random.Random(columns)
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + source.choice((1, 2, 4, 7))])
        at += len(pieces[-1])
    streamed = shown(pieces, columns=columns, lines=lines, color=True)
    assert streamed.cells() == shown([text], columns=columns, lines=lines, color=True).cells()


@given(cut_texts(), st.sampled_from([99, 39, 19, 11]))
def test_a_row_that_is_drawn_again_is_never_wider_than_the_terminal(text: tuple[str, list[str]], width: int) -> None:
    """One that the terminal breaks into two could not be erased. A line of code may be wider, when it has ended."""
    pending = Pending(color=True)
    for piece in text[1]:
        pending.source += visible(piece)
        alive = pending.advance(width, is_open=True).alive
        assert all(columns_of(row) <= width for row in alive)


@pytest.mark.parametrize(
    "text",
    [
        PROSE * 400,
        "The quick brown fox. " * 2000,
        "日本語のテキスト。" * 2000,
        "```python\n" + "x = 'a' + b  # sum\n" * 2000,
        "- an item of a list\n" * 2000,
        "1. an item of a list\n\n" * 1500,
        (PROSE + "\n") * 400,
        SAMPLE * 60,
    ],
    ids=["prose", "plain prose", "no blanks", "code", "list", "loose list", "lines", "everything"],
)
def test_what_is_written_is_cut_off_so_that_a_token_costs_the_same_at_the_end(text: str) -> None:
    pending = Pending(color=True)
    longest = 0
    for at in range(0, len(text), 50):
        pending.source += text[at : at + 50]
        pending.advance(99, is_open=True)
        longest = max(longest, len(pending.source))
    assert longest < 3000


def test_pieces_that_come_faster_than_frames_are_drawn_together() -> None:
    terminal = Terminal()
    answer = Answer(terminal, pause=0.002)
    for _ in range(1000):
        answer.add("word ")
    assert len(terminal.written) < 1000 * 0.002 / 0.05 + 2
    answer.end()
    assert " ".join(terminal.rows()).split() == ["word"] * 1000


def test_a_piece_that_changes_nothing_writes_nothing() -> None:
    terminal = Terminal()
    answer = Answer(terminal)
    answer.add("word")
    terminal.written.clear()
    answer.add(" ")
    answer.add("")
    assert terminal.written == []


def test_text_that_grows_is_only_added_to() -> None:
    terminal = Terminal()
    answer = Answer(terminal, color=True)
    for piece in ("A few", " words", " more"):
        answer.add(piece)
    assert terminal.written == ["A few", " words", " more"]


def test_a_word_near_the_end_of_a_row_is_drawn_when_it_is_whole_so_that_none_jumps() -> None:
    text = "Words of many lengths, and some ordinary, go on and on. " * 20
    for columns in (100, 40):
        terminal = Terminal(columns)
        answer = Answer(terminal)
        for at in range(0, len(text), 2):
            answer.add(text[at : at + 2])
        assert "\x1b" not in "".join(terminal.written)


def test_rows_alive_never_fill_the_screen() -> None:
    """A row that scrolls off cannot be erased any more. What is hidden meanwhile is there in the end."""
    lines = [f"| {n} | some words |\n" for n in range(50)]
    terminal = Terminal(60, 10)
    answer = Answer(terminal)
    answer.add("| n | text |\n|---|---|\n")
    for line in lines:
        answer.add(line)
        assert len(terminal.screen.history.top) == 0
    answer.end()
    assert terminal.rows() == shown(["| n | text |\n|---|---|\n" + "".join(lines)], columns=60).rows()


def test_an_answer_without_text_leaves_no_trace() -> None:
    for text in ("", " ", "\n\n"):
        assert shown([text]).written == []


def test_the_next_line_begins_in_the_first_column() -> None:
    for text in ("word", "# head", "```\ncode", "| a |\n|---|\n", "- "):
        terminal = shown([text])
        terminal.write("next")
        assert terminal.rows()[-1] == "next"


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([100, 80, 47, 33, 20, 14])), min_size=1, max_size=30),
    st.sampled_from(
        ["Words that go on. " * 40, "- a longer item of a list\n" * 20, "日本語の\n" * 9 + "Plain words. " * 30]
    ),
)
@settings(max_examples=50)
def test_a_terminal_that_changes_its_width_loses_and_repeats_nothing(steps: list[tuple[int, int]], text: str) -> None:
    """What is drawn at that moment may be broken in another place; every character is there once, in order."""
    terminal = ReflowingTerminal(100)
    answer = Answer(terminal)
    at = 0
    for length, columns in steps:
        for _ in range(length):
            answer.add(text[at : at + 3])
            at += 3
        terminal.resize(columns)
    answer.add(text[at:])
    answer.end()
    wide = shown([text], columns=500, color=False).rows()
    assert "".join("".join(terminal.lines).split()) == "".join("".join(wide).split())


def test_what_was_undecided_when_the_width_changed_is_shown_again_and_nothing_else() -> None:
    terminal = ReflowingTerminal(80)
    answer = Answer(terminal)
    answer.add("Some words that stand before it and fill the row, and **bol")
    terminal.resize(20)
    answer.add("d** words.")
    answer.end()
    assert "".join(terminal.lines) == ("Some words that stand before it and fill the row, and **bol**bold** words.")


def test_a_table_is_whole_after_the_terminal_became_narrower() -> None:
    table = "| Name | What it is for |\n|---|---|\n" + "| a name | a few words about it |\n" * 5
    terminal = ReflowingTerminal(100)
    answer = Answer(terminal)
    answer.add(table[:100])
    terminal.resize(30)
    answer.add(table[100:])
    answer.end()
    expected = shown([table], columns=30).rows()
    assert [line.rstrip() for line in terminal.lines[-len(expected) - 1 : -1]] == expected


# What it looks like


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
    assert f"\n{line}\n    y\n" in "".join(terminal.written)
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


def test_a_table_too_wide_for_the_terminal_has_one_cell_a_line() -> None:
    text = "| Name | Value | Note |\n|---|---|---|\n| a name | some value | a note |\n| b | c | d |"
    assert rows(text, 20) == ["Name: a name", "Value: some value", "Note: a note", "", "Name: b", "Value: c", "Note: d"]


def test_without_color_the_signs_of_emphasis_stay() -> None:
    text = "# Head\n\n**bold** *it* `code` ~~no~~"
    written = "".join(shown([text], color=False).written)
    assert "\x1b" not in written
    assert written.split("\n") == ["# Head", "", "**bold** *it* `code` ~~no~~", ""]


def test_only_attributes_and_the_terminals_own_colors_are_used() -> None:
    """So that it can be read on light and dark: no painted background, no color of ours."""
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
