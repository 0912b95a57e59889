"""The rows at the bottom of the screen, which still change; those above them never do."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LiveRows:
    """Rows on the screen that may be redrawn. `write` sends text to the terminal.

    The cursor is at the end of the last row or, if no row is alive, in the first column of a fresh line. All that is
    needed is moving up and erasing downwards: no terminal mode is changed, so nothing has to be restored.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._drawn: list[str] = []

    def draw(self, done: Sequence[str], alive: Sequence[str]) -> None:
        """Replace the live rows: with rows that are `done` and will not change again, then with the new live ones.

        Only differences are written. A live row must be narrower than the terminal, and there must be fewer of them
        than the terminal has rows; rows that are done may have any length.
        """
        drawn, rows = self._drawn, [*done, *alive]
        same = 0
        while same < min(len(drawn), len(rows)) and drawn[same] == rows[same]:
            same += 1
        if alive and same == len(rows):
            same -= 1  # the cursor has to end on the last row: write that one again
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
        """Leave the first live rows on the screen and erase the others; later rows begin below them."""
        self.draw(self._drawn[:count], [])
