"""Tests of highlighted code in answers: its colors, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.answers.markdown.view import MarkdownView
from tests.support.cli.terminals import Terminal

LANGUAGES = [
    "python",
    "js",
    "c++",
    "c#",
    "bash",
    "json",
    "html",
    "sql",
    "diff",
    "yaml",
    "rust",
    "console",
    "pycon",
    "",
    "?",
]
SIGNS = [
    "def ",
    "x",
    "'",
    '"',
    '"""',
    "/*",
    "*/",
    "# ",
    "//",
    "\n",
    "\n\n",
    "    ",
    "<a ",
    "$ ",
    ">>> ",
    "+",
    "-",
    "{",
    "}",
    "0",
    "é",
]


def written(pieces: list[str], *, lines: int = 24) -> Terminal:
    terminal = Terminal(80, lines)
    now = 0.0
    view = MarkdownView(color=True, write=terminal.write, size=terminal.size, clock=lambda: now)
    for piece in pieces:
        now += 1
        view.text(piece)
    view.end()
    return terminal


@pytest.mark.push
@given(st.sampled_from(LANGUAGES), st.lists(st.sampled_from(SIGNS), min_size=1, max_size=30).map("".join))
def test_no_language_changes_the_text(language: str, code: str) -> None:
    shown = written([f"```{language}\n{code}\n```\nend"]).rows()
    assert shown[1:-3] == [line.rstrip() for line in code.split("\n")]


@pytest.mark.parametrize(
    ("language", "line", "color"),
    [
        ("python", "def f(): pass", "magenta"),
        ("python", "'text'", "green"),
        ("py", "123", "cyan"),
        ("javascript", "'text'", "green"),
        ("c", "return x;", "magenta"),
        ("python:main.py", "import os", "magenta"),
        ("diff", "-gone", "red"),
        ("diff", "+new", "green"),
        ("of-nobody", "def f(): pass", "default"),
    ],
)
def test_what_helps_reading_is_colored(language: str, line: str, color: str) -> None:
    cells = written([f"```{language}\n{line}\n```"]).cells()[1]
    assert cells[0].fg == color
    assert all(cell.bg == "default" for cell in cells)


@pytest.mark.night
def test_code_higher_than_the_terminal_scrolls_line_by_line_and_keeps_its_colors() -> None:
    """The first lines can be read in the scrollback before the last ones arrive."""
    lines = [f"x{n} = 'a'  # note" for n in range(200)]
    terminal = Terminal(80, 10)
    now = 0.0
    view = MarkdownView(color=True, write=terminal.write, size=terminal.size, clock=lambda: now)
    view.text("```python\n")
    for number, line in enumerate(lines):
        now += 1
        view.text(f"{line}\n")
        assert terminal.rows()[1:] == lines[: number + 1]
    view.end()
    rows = terminal.cells()[1:-1]
    assert len(rows) == 200
    assert {row["".join(cell.data for cell in row).index("'")].fg for row in rows} == {"green"}
