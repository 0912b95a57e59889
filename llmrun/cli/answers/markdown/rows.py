"""Wraps text into terminal rows, splits rows, and encodes them as text for the terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

from rich.color import ColorSystem
from rich.segment import Segment
from rich.text import Text

from llmrun.cli.console.flow import CLOSING, WIDE
from llmrun.cli.console.terminal import visible, visible_line, width

Row = list[Segment]

_MOST_MARKS = 8  # maximum number of combining marks per character; no script needs more than five
_LAYOUT = str.maketrans("", "", " \u2502\u2500\u253c")  # deletes characters whose number depends on the screen's width


def plain(row: Row) -> str:
    return "".join(segment.text for segment in row)


def columns_of(row: Row) -> int:
    return width(plain(row))


def ink(row: Row) -> str:
    """Return the row's text without spaces and box-drawing lines, or a newline if no other text is left.

    The ink of a whole block does not depend on the terminal's width.
    """
    return plain(row).translate(_LAYOUT) or "\n"


def rows_of(segments: Iterable[Segment]) -> list[Row]:
    """Split Rich's output into rows, without trailing spaces and without blank rows at the start."""
    rows: list[Row] = []
    for line in Segment.split_lines(segments):
        row = list(Segment.simplify(line))
        while row and not (text := row[-1].text.rstrip(" ")):
            row.pop()
        if row:
            row[-1] = Segment(text, row[-1].style)
        if row or rows:
            rows.append(row)
    return rows


def encoded(row: Row, *, color: bool) -> str:
    """Encode a row as text for the terminal. All untrusted text passes through this function."""
    parts = []
    for text, style, _ in row:
        safe = visible_line(text)
        parts.append(style.render(safe, color_system=ColorSystem.STANDARD) if style and color else safe)
    return "".join(parts)


def shown(text: str) -> str:
    """Make text safe to show by escaping control characters, replacing tabs and limiting combining marks."""
    text = visible(text).replace("\t", " ")
    return text if text.isascii() else _MARKS.sub(_thinned, text)


# Combining marks are neither word characters nor ASCII, so the pattern skips all word and ASCII characters.
_MARKS = re.compile(rf"[^\w\x00-\x7f]{{{_MOST_MARKS + 1},}}")


def _thinned(run: re.Match[str]) -> str:
    """Replace combining marks beyond the limit with their code points."""
    written = []
    marks = 0
    for character in run[0]:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        written.append(character if marks <= _MOST_MARKS else f"<{ord(character):04X}>")
    return "".join(written)


def cut(row: Row, at: int) -> tuple[Row, Row]:
    """Split a row after its first `at` characters."""
    for number, (text, style, _) in enumerate(row):
        if at < len(text):
            return [*row[:number], Segment(text[:at], style)], [Segment(text[at:], style), *row[number + 1 :]]
        at -= len(text)
    return row, []


def folded(row: Row, limit: int) -> Iterator[Row]:
    """Break a row at any character into rows of at most `limit` columns. All spaces are kept."""
    *others, _ = _chopped(plain(row), 0, limit) if columns_of(row) > limit else [(0, 0)]
    for begin, end in others:
        first, row = cut(row, end - begin)
        yield first
    yield row


def without_beginning(rows: list[Row], count: int) -> list[Row]:
    """Drop the first `count` characters that are not spaces. The remaining text may start in the middle of a row."""
    for number, row in enumerate(rows):
        if count <= 0:
            return rows[number:]
        marks = ink(row)
        if len(marks) > count:
            at = 0
            while count:
                count -= plain(row)[at].translate(_LAYOUT) != ""
                at += 1
            return [cut(row, at)[1], *rows[number + 1 :]]
        count -= len(marks)
    return []


def without_last_word(row: Row) -> Row | None:
    """Drop the row's last word. Returns None if the row is empty or its last segment is a single word."""
    if not row:
        return None
    text, style, _ = row[-1]
    before, blank, _ = text.rpartition(" ")
    return [*row[:-1], Segment(before.rstrip(" "), style)] if blank else None


def wrapped(text: Text, limit: int) -> Iterator[Text]:
    """Wrap text at newlines and spaces into rows of at most `limit` columns. Words longer than a row start a new row.

    Rich avoids line breaks in Chinese and Japanese sentences and allows punctuation at the start of a row. This
    function fills each row before it starts the next one, so appending text changes only the last two rows.
    """
    for line in text.split("\n", allow_blank=True):
        begins = [begin for begin, _ in _filled(line.plain, limit)]
        for row in line.divide(begins)[1:]:
            row.rstrip()
            row.no_wrap, row.overflow = True, "ignore"
            yield row


_PIECE = re.compile(rf"( *)([{WIDE}]{CLOSING}|[^ {WIDE}]+{CLOSING})")


def _filled(text: str, limit: int) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    begin = end = used = 0
    for piece in _PIECE.finditer(text):
        gap, size = len(piece[1]), width(piece[2])
        if used and used + gap + size <= limit:
            end, used = piece.end(), used + gap + size
            continue
        if used:
            rows.append((begin, end))
        begin, end, used = piece.start(2), piece.end(), size
        if size > limit:
            *whole, (begin, end) = _chopped(piece[2], piece.start(2), limit)
            rows.extend(whole)
            used = width(text[begin:end])
    return [*rows, (begin, end)]


def _chopped(text: str, start: int, limit: int) -> Iterator[tuple[int, int]]:
    begin = used = 0
    for at, character in enumerate(text):
        size = width(character)
        if used + size > limit and at > begin:
            yield start + begin, start + at
            begin, used = at, 0
        used += size
    yield start + begin, start + len(text)
