"""Breaks the rows of long input between words.

prompt_toolkit breaks rows at any character. The control in this module therefore fills each row with spaces up to the
width of the terminal, so that prompt_toolkit's break falls between two words. The edited text does not contain these
spaces.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from prompt_toolkit.data_structures import Point
from prompt_toolkit.formatted_text import StyleAndTextTuples, to_formatted_text
from prompt_toolkit.formatted_text.utils import fragment_list_to_text, fragment_list_width
from prompt_toolkit.layout.containers import Window
from prompt_toolkit.layout.controls import BufferControl, GetLinePrefixCallable, UIContent
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.layout.utils import explode_text_fragments

from llmrun.cli.console.flow import CLOSING, WIDE

_PIECE = re.compile(rf" |[{WIDE}]{CLOSING}|[^ {WIDE}]+{CLOSING}")
_NARROWEST = 4  # minimum number of columns behind the prompt; on narrower terminals, rows break at any character


@lru_cache(maxsize=4096)
def cells(character: str) -> int:
    """Return the number of columns in which prompt_toolkit draws a character."""
    return Char(character).width


def _width(text: str) -> int:
    return len(text) if text.isascii() and text.isprintable() else sum(map(cells, text))


@lru_cache(maxsize=16)  # each redraw needs the rows several times
def row_starts(line: str, first: int, others: int) -> Sequence[int]:
    """Return the index of the first character of each row of a line.

    A word moves to the next row unless the row also has room for the next character if it is a space, because the
    cursor is behind the word while the word is being typed. Only words that are longer than a row are split.

    first, others  the number of columns in the first row and in each of the other rows
    """
    starts = [0]
    left = first
    for piece in _PIECE.finditer(line):
        begin, end = piece.span()
        size = _width(piece[0])
        needed = size + (piece[0] != " " and line[end : end + 1] == " ")
        if needed > others:
            needed = size
        while begin < end and not cells(line[begin]):  # combining characters stay with the character before them
            begin += 1
        if needed > left and size and begin > starts[-1]:
            starts.append(begin)
            left = others
        if size <= left:
            left -= size
            continue
        for at in range(begin, end):
            width = cells(line[at])
            if width > left and at > starts[-1]:
                starts.append(at)
                left = others
            left -= width
    return starts


class _Line(NamedTuple):
    """A line whose rows are filled with spaces, except the last row.

    before, after  the index of the first character of each row, without and with the spaces
    """

    fragments: StyleAndTextTuples
    before: Sequence[int]
    after: Sequence[int]


class _WrappedContent(UIContent):
    """The content of the input whose rows break between words."""

    def __init__(self, content: UIContent, width: int, prefix: GetLinePrefixCallable) -> None:
        self._content, self._width, self._prefix = content, width, prefix
        self._lines: dict[int, _Line] = {}
        menu = content.menu_position
        super().__init__(
            lambda lineno: self._line(lineno).fragments,
            content.line_count,
            self._moved(content.cursor_position),
            None if menu is None else self._moved(menu),
            content.show_cursor,
        )

    def get_height_for_line(
        self, lineno: int, width: int, get_line_prefix: GetLinePrefixCallable | None, slice_stop: int | None = None
    ) -> int:
        """Return the number of rows of a line, or the number of rows up to the cursor's position `slice_stop`.

        prompt_toolkit's own method does not count the row of a cursor that is in the first column of the row.
        """
        rows = self._line(lineno).after
        return len(rows) if slice_stop is None else bisect_right(rows, slice_stop)

    def _moved(self, point: Point) -> Point:
        line = self._line(point.y)
        row = bisect_right(line.before, point.x) - 1
        return Point(point.x - line.before[row] + line.after[row], point.y)

    def _line(self, lineno: int) -> _Line:
        if lineno not in self._lines:
            self._lines[lineno] = self._wrapped(lineno)
        return self._lines[lineno]

    def _wrapped(self, lineno: int) -> _Line:
        fragments = self._content.get_line(lineno)
        text = fragment_list_to_text(fragments)
        rooms = [self._width - fragment_list_width(to_formatted_text(self._prefix(lineno, row))) for row in (0, 1)]
        before = row_starts(text, *rooms)
        if len(before) == 1:
            return _Line(fragments, before, before)
        characters = explode_text_fragments(fragments)
        filled: StyleAndTextTuples = []
        after = [0]
        for row, (begin, end) in enumerate(pairwise(before)):
            blanks = rooms[min(row, 1)] - _width(text[begin:end])
            filled += [*characters[begin:end], ("", " " * blanks)]
            after.append(after[-1] + end - begin + blanks)
        return _Line([*filled, *characters[before[-1] :]], before, after)


class WordWrappedControl(BufferControl):
    """The control of an input window, with rows that break between words instead of at any character."""

    def __init__(self, window: Window) -> None:
        """Create a control that replaces the BufferControl of a window, whose lines have prefixes."""
        plain, prefix = window.content, window.get_line_prefix
        assert isinstance(plain, BufferControl)
        assert prefix is not None
        super().__init__(
            buffer=plain.buffer,
            input_processors=plain.input_processors,
            include_default_input_processors=plain.include_default_input_processors,
            lexer=plain.lexer,
            preview_search=plain.preview_search,
            search_buffer_control=plain.search_buffer_control,
        )
        self._prefix: GetLinePrefixCallable = prefix

    def create_content(self, width: int, height: int, preview_search: bool = False) -> UIContent:
        content = super().create_content(width, height, preview_search)
        widest = max(fragment_list_width(to_formatted_text(self._prefix(0, row))) for row in (0, 1))
        return _WrappedContent(content, width, self._prefix) if width - widest >= _NARROWEST else content
