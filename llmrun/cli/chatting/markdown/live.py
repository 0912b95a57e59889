"""Redraws the rows at the bottom of the screen that may still change. The rows above them never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LiveRows:
    """The rows on the screen that can still be redrawn. `write` sends text to the terminal.

    The cursor is at the end of the last live row. If there are no live rows, it is in the first column of a new line.
    Drawing only moves the cursor up and erases downwards. It changes no terminal modes, so there is nothing to restore.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._drawn: list[str] = []

    def draw(self, done: Sequence[str], alive: Sequence[str]) -> None:
        """Replace the live rows with finished rows (`done`), followed by new live rows (`alive`).

        Only the differences are written. Each live row must be narrower than the terminal, and there must be fewer live
        rows than the terminal has rows. Finished rows may have any length.
        """
        drawn, rows = self._drawn, [*done, *alive]
        same = 0
        while same < min(len(drawn), len(rows)) and drawn[same] == rows[same]:
            same += 1
        if alive and same == len(rows):
            same -= 1  # rewrite the last row, because the cursor must be at its end
        text = ""
        behind_a_row = bool(drawn)
        if same < len(drawn):
            if same == len(drawn) - 1 and same < len(rows) and rows[same].startswith(drawn[same]):
                text = rows[same][len(drawn[same]) :]
                same += 1
            else:
                up = len(drawn) - 1 - same
                text = "\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J"
                behind_a_row = False
        if rows[same:]:
            text += ("\n" if behind_a_row else "") + "\n".join(rows[same:])
            behind_a_row = True
        if behind_a_row and not alive:
            text += "\n"
        self._drawn = list(alive)
        if text:
            self._write(text)

    def leave(self, count: int) -> None:
        """Make the first `count` live rows permanent and erase the others. Later rows are drawn below them."""
        self.draw(self._drawn[:count], [])
