"""Colors for code, line by line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.chatting.markdown.code import COMMENT, KEYWORD, NUMBER, STRING, Colors
from llmrun.cli.chatting.markdown.languages import language_of
from llmrun.cli.chatting.markdown.rows import Span, plain

LANGUAGES = ["python", "js", "c", "rust", "sql", "html", "lua", "bash", "diff", "no such language", ""]
CODE = st.lists(
    st.sampled_from(['"', "'", '"""', "`", "#", "//", "/*", "*/", "<!--", "-->", "\\", "if", "1e5", " ", "x"])
)


def colored(language: str, *lines: str) -> list[list[Span]]:
    colors = Colors(language, color=True)
    return [list(colors.line(line)) for line in lines]


@given(st.sampled_from(LANGUAGES), st.lists(CODE.map("".join), max_size=6))
def test_colors_change_no_character(language: str, lines: list[str]) -> None:
    assert [plain(line) for line in colored(language, *lines)] == lines


@given(st.sampled_from(LANGUAGES), st.lists(CODE.map("".join), max_size=6))
def test_the_rest_of_a_block_is_colored_the_same_when_its_beginning_is_gone(language: str, lines: list[str]) -> None:
    whole = Colors(language, color=True)
    for line in lines:
        rest = Colors(language, color=True, until=whole.until)
        assert rest.line(line) == whole.line(line)
        assert rest.until == whole.until


def test_python() -> None:
    assert colored("python", 'def f(x1): return "a" + 12  # why') == [
        [
            *(
                ("def", KEYWORD),
                (" ", ""),
                ("f", ""),
                ("(", ""),
                ("x1", ""),
                ("): ", ""),
                ("return", KEYWORD),
                (" ", ""),
            ),
            *(('"a"', STRING), (" + ", ""), ("12", NUMBER), ("  ", ""), ("# why", COMMENT)),
        ]
    ]


def test_a_string_and_a_comment_go_on_over_lines() -> None:
    assert colored("py", '"""if', "for", 'not""" if') == [
        [('"""if', STRING)],
        [("for", STRING)],
        [('not"""', STRING), (" ", ""), ("if", KEYWORD)],
    ]
    assert colored("c", "/* if", "int */ int") == [
        [("/* if", COMMENT)],
        [("int */", COMMENT), (" ", ""), ("int", KEYWORD)],
    ]


def test_an_apostrophe_is_no_string() -> None:
    assert colored("rust", "fn f<'a>(x: &'a str)")[0][0] == ("fn", KEYWORD)
    assert ("don't", STRING) not in colored("python", "don't")[0]


def test_a_changed_line_of_a_diff_has_one_color() -> None:
    added, removed, kept = colored("diff", "+a = 1", "-a = 2", " a")
    assert len(added) == len(removed) == 1
    assert added[0][1] != removed[0][1] != kept[0][1] == ""


@pytest.mark.parametrize("language", ["python", "nothing we know"])
def test_without_color_there_is_none(language: str) -> None:
    assert Colors(language, color=False).line("if 1: # x") == (("if 1: # x", ""),)


def test_a_very_long_line_is_data() -> None:
    line = '"\\"' * 2000
    assert colored("python", line) == [[(line, "")]]


def test_languages_are_known_by_their_short_names() -> None:
    for name in ("py", "JS", "c++", "Rust", "sh", "yml"):
        assert language_of(name) is not None
