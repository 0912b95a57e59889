"""Tests of answers on a terminal, while they stream and when they are complete."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.cli.answers.markdown.pending import Pending
from llmrun.cli.answers.markdown.rows import columns_of
from llmrun.cli.answers.markdown.view import MarkdownView
from llmrun.cli.console.terminal import visible
from tests.support.cli.reflowing import ReflowingTerminal
from tests.support.cli.shown_answers import PROSE, SAMPLE, Answer, shown
from tests.support.cli.terminals import Terminal
from tests.support.tiers import examples

pytestmark = pytest.mark.push

PIECES = [
    *("word ", "a", "b ", "*", "**", "_", "`", "``", "```", "```python\n", "\n", "\n\n", "- ", "  - ", "1. ", "2. "),
    *("# ", "> ", "---", "***", "|", "| a | b |\n", "|---|:-:|\n", "a | b\n", "-|-\n", "[", "]", "(", ")", "!["),
    *("](http://x.y/z)", "<", "<http://a.b>", "&amp;", "&#27;", "\\", "\\(", "~~", "~~~\n", "    ", "   ", "\t"),
    *("\r\n", "\r", "snake_case ", "words in prose that go on and on, to fill a row. ", "日本語のテキスト。"),
    *("e\u0301", "😀", "🇩🇪", "x" * 30, '"""', "# c", "/* ", " */", "'", "+ ", "\u2028", "\x1b[31m", "\x9b"),
    *("&", "!", "=", "===\n", "<b>", "0123456789", " ", "0"),
]


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw a text and its pieces, split at arbitrary places."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=60)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text))))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.night
@given(cut_texts(), st.sampled_from([100, 40, 20, 12, 11]), st.sampled_from([30, 8]), st.booleans())
@settings(max_examples=examples(100))
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
        "-\n\n--",  # an item that becomes a paragraph together with its blank row
        "# |b\n-|-",  # a heading that a table must not swallow
        "f\n<|\n--a",  # a table that turns back into text
        "text\n***bold***",  # a rule that becomes text
        "text\n```a` b",  # a fence that becomes text
        "_some words that go on and on and on_b",  # emphasis that turns out to be text
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


@pytest.mark.night
@pytest.mark.parametrize("columns", [100, 40, 20])
@pytest.mark.parametrize("lines", [30, 6])
def test_a_long_answer_looks_the_same_token_by_token(columns: int, lines: int) -> None:
    text = PROSE * 8 + "\n\n" + SAMPLE + "\n\n" + "日本語のテキスト。" * 40 + "\n\n" + "- an item\n" * 40
    source = random.Random(columns)
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + source.choice((1, 2, 4, 7))])
        at += len(pieces[-1])
    streamed = shown(pieces, columns=columns, lines=lines, color=True)
    assert streamed.cells() == shown([text], columns=columns, lines=lines, color=True).cells()


@given(cut_texts(), st.sampled_from([99, 39, 19, 11]))
def test_a_row_that_is_drawn_again_is_never_wider_than_the_terminal(text: tuple[str, list[str]], width: int) -> None:
    """A row that the terminal wraps could not be erased. A finished line of code may be wider."""
    pending = Pending(color=True)
    for piece in text[1]:
        pending.source += visible(piece)
        _, alive = pending.advance(width, 20, is_open=True)
        assert all(columns_of(row) <= width for row in alive)


@pytest.mark.night
@pytest.mark.parametrize(
    "text",
    [
        "- an item of a list\n" * 1000,
        "1. an item of a list\n\n" * 700,
        "```python\n" + "x = 'a' + b  # sum\n" * 500,
        SAMPLE * 30,
        (PROSE + "\n\n") * 100,
    ],
    ids=["list", "loose list", "code", "everything", "paragraphs"],
)
def test_what_is_written_is_cut_off_so_that_a_token_costs_the_same_at_the_end(text: str) -> None:
    pending = Pending(color=True)
    longest = 0
    for at in range(0, len(text), 50):
        pending.source += text[at : at + 50]
        pending.advance(99, 29, is_open=True)
        longest = max(longest, len(pending.source))
    assert longest < 3000


def test_drawing_takes_a_small_part_of_the_time_however_long_a_block_is() -> None:
    """Paragraphs and tables are drawn whole, so the longer a draw takes, the less often they are drawn."""
    now = 0.0
    drawing = 0.0

    def size() -> tuple[int, int]:
        nonlocal now, drawing
        now += 0.5  # the time one frame takes
        drawing += 0.5
        return 80, 24

    view = MarkdownView(color=False, write=lambda text: None, size=size, clock=lambda: now)
    for _ in range(2000):
        now += 0.05
        view.text("word ")
    assert 0 < drawing < 0.06 * now


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
    """A row that scrolls off can no longer be erased. Rows hidden in the meantime appear at the end."""
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


@pytest.mark.night
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([100, 80, 47, 33, 20, 14])), min_size=1, max_size=30),
    st.sampled_from(
        ["Words that go on. " * 40, "- a longer item of a list\n" * 20, "日本語の\n" * 9 + "Plain words. " * 30]
    ),
)
@settings(max_examples=examples(50))
def test_a_terminal_that_changes_its_width_loses_and_repeats_nothing(steps: list[tuple[int, int]], text: str) -> None:
    """The frame drawn at that moment may wrap elsewhere, but every character appears once and in order."""
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


@pytest.mark.parametrize(("color", "then"), [(False, "**bold** words."), (True, "**bolbold words.")])
def test_what_was_undecided_when_the_width_changed_is_shown_again_and_nothing_else(color: bool, then: str) -> None:
    terminal = ReflowingTerminal(80)
    answer = Answer(terminal, color=color)
    answer.add("Some words that stand before it and fill the row, and **bol")
    terminal.resize(20)
    answer.add("d** words.")
    answer.end()
    assert "".join(terminal.lines) == f"Some words that stand before it and fill the row, and {then}"


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


CONSTRUCTS = (
    *("{} **{}** {}", "*{} {}* ~~{}~~", "`{}` [{}](http://x.y/{})", "![{}](http://x.y/{}) {}", "<http://{}.y> {} {}"),
    *(
        "# {}\n{}\n{}",
        "- {}\n  - {}\n\n    {}",
        "7. {}\n9. {}\n   1. {}",
        "> {}\n> - {}\n>\n> {}",
        "    {}\n\n    {}\n{}",
    ),
    *("| {} | {} |\n|--|--|\n| {} |", "| {} |\n|--|\n| {} | {} |", "```{} {}\n{}", "```python\n{} = '{}'\n\n# {}\n```"),
    *(
        "<b>{}</b> &amp; {}<!-- {} -->",
        "{}\\\n{}  \n{}",
        "***{}\n{}***{}",
        "[{}]: http://{}\n\n[{}]",
        "{}\n===\n{}\n---\n{}",
    ),
)


@pytest.mark.night
@given(
    st.lists(st.tuples(st.sampled_from(CONSTRUCTS), st.sampled_from(["\n", "\n\n"])), min_size=1, max_size=8),
    st.sampled_from([100, 30, 13]),
)
def test_no_word_is_lost(parts: list[tuple[str, str]], columns: int) -> None:
    """Each word repeats one letter. A row may break a word, but nothing may come between its letters."""
    words = iter(letter * 3 for letter in "CDFJKLQRSUVW")  # no construct contains these letters
    text = ""
    expected = ""
    for construct, end in parts[:4]:
        three = [next(words) for _ in range(3)]
        text += construct.format(*three) + end
        expected += "".join(three)
    for on_rows in (shown(in_threes(text), columns=columns).rows(), shown([text], columns=columns).rows()):
        on_screen = "".join(on_rows).upper()
        for letter in set(expected):
            assert on_screen.count(letter) >= 3, text


def in_threes(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]
