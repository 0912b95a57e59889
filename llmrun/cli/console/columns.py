"""Formats plain-text tables and wraps text, without Rich, because importing Rich takes 60 ms."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence

from llmrun.cli.console.terminal import columns, is_terminal, shortened, visible_line, width

_LEAST_ROOM = 20  # minimum number of columns for text, even on narrower terminals


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart. Make control characters visible.

    right  indices of the right-aligned columns
    """
    shown = [[visible_line(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in shown]


def narrowed(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], droppable: Sequence[Collection[str]]
) -> list[str]:
    """Format rows like `aligned`, with a header line. Drop columns if the terminal is too narrow.

    right      headings of the right-aligned columns
    droppable  groups of column headings; the columns of one group at a time are dropped until the lines fit
    """
    gone: set[str] = set()
    for group in ((), *droppable):
        gone |= set(group)
        kept = [number for number, head in enumerate(heads) if head not in gone]
        table = [[row[number] for number in kept] for row in (heads, *rows)]
        lines = aligned(table, [place for place, number in enumerate(kept) if heads[number] in right])
        if not is_terminal(sys.stdout) or max(map(width, lines)) < columns():
            break
    return lines


def beside(label: str, text: str, most: int) -> list[str]:
    """Return a label followed by text, as lines of at most `most` columns with a hanging indent."""
    left = width(label)
    first, *rest = wrapped(text, most - left)
    return [label + first, *(" " * left + line for line in rest)]


def hanging(line: str, most: int) -> list[str]:
    """Wrap a line at spaces. Align the second and later rows with the text after the line's indentation and label.

    A label is a few words that are followed by two spaces.
    """
    if width(line) <= most:
        return [line]
    label = re.match(r" {0,16}(?:\S.{0,20}? {2,}(?=\S))?", line)
    assert label is not None  # both parts are optional
    return beside(label[0], line[label.end() :], most)


def wrapped(text: str, most: int) -> list[str]:
    """Wrap text at spaces to lines of at most `most` columns. Words longer than a line are split.

    The standard `textwrap` counts characters instead of columns, but Chinese, Japanese and Korean characters take up
    two columns each.
    """
    most = max(most, _LEAST_ROOM)
    lines = [""]
    for word in re.findall(" *[^ ]+", visible_line(text)):  # each match is a word with the spaces before it
        if width(lines[-1]) + width(word) <= most:
            lines[-1] += word
            continue
        lines += _pieces(word.lstrip(" "), most)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def _pieces(word: str, most: int) -> Iterator[str]:
    while word:
        piece = shortened(word, most)
        yield piece
        word = word[len(piece) :]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    cells = []
    for number, (cell, room) in enumerate(zip(row, widths, strict=True)):
        blanks = " " * (room - width(cell))
        cells.append(blanks + cell if number in right else cell + blanks)
    return cells
