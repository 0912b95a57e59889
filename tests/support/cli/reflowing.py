"""A terminal that rewraps its lines when its width changes, as most do today but pyte does not.

It supports what an answer's view writes: text, newlines, colors, cursor up, and erasing below the cursor.
"""

from __future__ import annotations

import re

_WRITTEN = re.compile(r"\x1b\[(?P<count>\d*)(?P<letter>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)")


class ReflowingTerminal:
    """A terminal that stores unwrapped lines and wraps them at the current width. Every character is one column wide.

    The cursor is at an offset in a line, which may be in any of that line's rows.
    """

    def __init__(self, columns: int, lines: int = 24) -> None:
        self.columns, self.rows_shown = columns, lines
        self.lines = [""]
        self._line = self._offset = 0

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows_shown

    def resize(self, columns: int) -> None:
        self.columns = columns

    def write(self, text: str) -> None:
        at = 0
        for part in _WRITTEN.finditer(text):
            assert part.start() == at, f"unknown: {text[at : at + 20]!r}"
            at = part.end()
            if part["text"]:
                line = self.lines[self._line]
                self.lines[self._line] = line[: self._offset] + part["text"] + line[self._offset + len(part["text"]) :]
                self._offset += len(part["text"])
            elif part["control"] == "\r":
                self._offset -= self._column()
            elif part["control"] == "\n":
                assert self._line == len(self.lines) - 1, "a newline above the last line"
                self.lines.append("")
                self._line, self._offset = self._line + 1, 0
            elif part["letter"] == "A":
                for _ in range(int(part["count"] or 1)):
                    self._up()
            elif part["letter"] == "J":
                del self.lines[self._line + 1 :]
                self.lines[self._line] = self.lines[self._line][: self._offset]
            else:
                assert part["letter"] == "m", part[0]
        assert at == len(text)

    def _column(self) -> int:
        """Return the cursor's column. At the end of a line that fills its last row, the cursor stays in that row."""
        if self._offset and self._offset % self.columns == 0 and self._offset == len(self.lines[self._line]):
            return self.columns
        return self._offset % self.columns

    def _up(self) -> None:
        column = self._column()
        if self._offset - column > 0:
            self._offset -= self.columns
        elif self._line:
            self._line -= 1
            above = self.lines[self._line]
            first = max(0, (len(above) - 1) // self.columns) * self.columns
            self._offset = min(first + column, len(above))
