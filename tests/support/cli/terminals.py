"""An in-memory terminal, based on pyte, with its screen, scrollback and modes."""

from __future__ import annotations

import re
from typing import Any

import pyte

# pyte drops all input after a zero-width character, such as a joiner between emoji.
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\ufe00-\ufe0f\U000e0000-\U000e007f]")


class Terminal:
    r"""A terminal that receives a program's output. `\n` also returns to the first column, as in a terminal's usual
    mode."""

    def __init__(self, columns: int = 100, lines: int = 30, scrollback: int = 100_000) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=scrollback, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)
        self._stream.feed(_INVISIBLE.sub("", text).replace("\n", "\r\n"))

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    def resize(self, columns: int, lines: int | None = None) -> None:
        self.screen.resize(lines or self.screen.lines, columns)

    def rows(self) -> list[str]:
        """Return scrollback and screen from top to bottom, without trailing blanks and trailing blank rows."""
        rows = ["".join(cell.data for cell in row).rstrip() for row in self.cells()]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def cells(self) -> list[list[Any]]:
        """Return the same rows as cells with colors and attributes."""
        columns = range(self.screen.columns)
        kept = [*self.screen.history.top, *(self.screen.buffer[line] for line in range(self.screen.lines))]
        cells = [[row[column] for column in columns] for row in kept]
        while cells and all(cell == self.screen.default_char for cell in cells[-1]):
            cells.pop()
        return cells

    def modes(self) -> dict[str, Any]:
        """Return the terminal's entire state except its text and the cursor's position."""
        screen = self.screen
        return {
            "mode": frozenset(screen.mode),
            "title": screen.title,
            "icon": screen.icon_name,
            "charset": (screen.charset, screen.g0_charset, screen.g1_charset),
            "margins": screen.margins,
            "tabs": frozenset(screen.tabstops),
            "hidden": screen.cursor.hidden,
            "attributes": screen.cursor.attrs,
            "saved": len(screen.savepoints),
            "size": (screen.columns, screen.lines),
        }
