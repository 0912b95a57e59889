"""Tests of which rows the live view redraws, and which it never redraws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.answers.markdown.view import LiveRows
from tests.support.cli.terminals import Terminal

ROWS = st.lists(st.sampled_from(["", "a", "ab", "abc", "b", "\x1b[1mbold\x1b[0m"]), max_size=5)


def visible(rows: list[str]) -> list[str]:
    plain = [row.replace("\x1b[1m", "").replace("\x1b[0m", "") for row in rows]
    while plain and not plain[-1]:
        plain.pop()
    return plain


@pytest.mark.push
@given(st.lists(st.tuples(ROWS, ROWS), max_size=10))
def test_the_screen_shows_what_is_done_and_what_is_alive(steps: list[tuple[list[str], list[str]]]) -> None:
    terminal = Terminal(20, 12)
    live = LiveRows(terminal.write)
    done: list[str] = []
    for more, alive in steps:
        live.draw(more, alive)
        done += more
        assert terminal.rows() == visible(done + alive)
    live.draw([], [])
    terminal.write("next")
    assert terminal.rows() == [*visible([*done, "."])[:-1], "next"]


@pytest.mark.push
@given(ROWS, st.integers(0, 5))
def test_rows_that_are_left_stay_and_the_others_go(alive: list[str], count: int) -> None:
    terminal = Terminal(20, 12)
    live = LiveRows(terminal.write)
    live.draw([], alive)
    live.leave(count)
    live.draw(["next"], [])
    assert terminal.rows() == [*visible([*alive[:count], "."])[:-1], "next"]


def test_only_what_differs_is_written() -> None:
    terminal = Terminal(20, 12)
    live = LiveRows(terminal.write)
    live.draw([], ["one", "two"])
    terminal.written.clear()
    live.draw([], ["one", "two"])
    live.draw(["one"], ["two"])
    assert terminal.written == []
    live.draw([], ["two", "three"])
    assert terminal.written == ["\nthree"]
