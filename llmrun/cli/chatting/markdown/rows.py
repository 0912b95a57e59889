"""Rows of a terminal: text in spans of one style, broken into rows, and turned into what is written."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmrun.cli.terminal import visible, visible_line, width

Span = tuple[str, str]  # text, and the SGR parameters that it is shown with: "1;4", or "" for plain
Spans = tuple[Span, ...]

BOLD = "1"
DIM = "2"
ITALIC = "3"
UNDERLINED = "4"
STRUCK = "9"

_MOST_MARKS = 8  # on one character; the scripts that stack the most need five


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `lead` is what the layout puts there (indentation, bullets, rules), `body` is the text's own."""

    body: Spans = ()
    lead: Spans = ()

    @property
    def weight(self) -> int:
        """How much of the text stands here, in a measure that no other width of the terminal changes."""
        return max(1, sum(ink(text) for text, _ in self.body))


def ink(text: str) -> int:
    """The characters of a text that are not blanks or newlines."""
    return len(text) - text.count(" ") - text.count("\n")


def plain(spans: Iterable[Span]) -> str:
    return "".join(text for text, _ in spans)


def styled(spans: Iterable[Span], style: str) -> Spans:
    """The spans with one more attribute."""
    return tuple((text, f"{before};{style}" if before else style) for text, before in spans)


def encoded(row: Row) -> str:
    """What is written to the terminal for a row: the one door between foreign text and the screen."""
    parts = []
    for text, style in row.lead + row.body:
        safe = visible_line(text)
        parts.append(f"\x1b[{style}m{safe}\x1b[0m" if style else safe)
    return "".join(parts)


def columns_of(row: Row) -> int:
    return width(plain(row.lead)) + width(plain(row.body))


def shown(text: str) -> str:
    """Text as it may be shown: control characters visible, tabs as blanks, and no character buried under marks.

    Asked for again after Markdown, whose entities (`&#27;`) hide a control character from any earlier look.
    """
    text = visible(text).replace("\t", " ")
    return text if text.isascii() else _MARKS.sub(_thinned, text)


_MARKS = re.compile(
    rf"[^\w\x00-\x7f]{{{_MOST_MARKS + 1},}}"
)  # runs that may hold too many: a mark is no word character


def _thinned(run: re.Match[str]) -> str:
    """Marks beyond the most that one character may carry, by number."""
    written = []
    marks = 0
    for character in run[0]:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        written.append(character if marks <= _MOST_MARKS else f"<{ord(character):04X}>")
    return "".join(written)


def wrapped(spans: Spans, limit: int) -> list[Spans]:
    """Rows of at most `limit` columns, broken at blanks; a word that is longer has its rows to itself.

    Each row is filled before the next begins, so that text that grows at its end changes no row but the last two.
    An empty text is one empty row.
    """
    return _sliced(spans, _filled(plain(spans), limit))


def folded(spans: Spans, limit: int) -> list[Spans]:
    """Rows of at most `limit` columns, broken anywhere and with every blank kept, as code has to be."""
    return _sliced(spans, list(_chopped(plain(spans), 0, limit)))


# A character of two columns is a word of its own (Chinese and Japanese have no blanks), with the closing punctuation
# that may not begin a row.
_WIDE = (
    r"\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
    r"\U00020000-\U0003fffd"
)
_CLOSING = r"[、。，．：；！？）」』】〕〉》…]*"
_PIECE = re.compile(rf"( *)([{_WIDE}]{_CLOSING}|[^ {_WIDE}]+{_CLOSING})")


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


def _chopped(text: str, start: int, limit: int) -> Iterable[tuple[int, int]]:
    begin = used = 0
    for at, character in enumerate(text):
        size = width(character)
        if used + size > limit and at > begin:
            yield start + begin, start + at
            begin, used = at, 0
        used += size
    yield start + begin, start + len(text)


def _sliced(spans: Spans, cuts: Sequence[tuple[int, int]]) -> list[Spans]:
    """The parts of styled text that lie between each pair of offsets, which are in order."""
    rows: list[Spans] = []
    first = offset = 0  # the span at hand, and where it begins
    for begin, end in cuts:
        row: list[Span] = []
        while first < len(spans) and offset + len(spans[first][0]) <= begin:
            offset += len(spans[first][0])
            first += 1
        at, where = first, offset
        while at < len(spans) and where < end:
            text, style = spans[at]
            if part := text[max(0, begin - where) : end - where]:
                row.append((part, style))
            where += len(text)
            at += 1
        rows.append(tuple(row))
    return rows
