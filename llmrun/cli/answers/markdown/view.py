"""Shows an answer as rendered Markdown while it streams.

A finished block is written once and then scrolls with the rest of the output. Unfinished blocks are redrawn in place.
If a block is taller than the terminal, only its last rows are redrawn.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence

from llmrun.cli.answers.markdown.pending import Pending
from llmrun.cli.answers.markdown.rows import Row, columns_of, encoded
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_color, visible


class LiveRows:
    """The rows on the screen that can still be redrawn. `write` sends text to the terminal.

    The cursor is at the end of the last live row or, if there are no live rows, in the first column of a new line.
    Drawing moves the cursor up and erases downwards, but changes no terminal modes, so no modes need to be restored.
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
        """Make the first `count` live rows permanent, so that later rows are drawn below them, and erase the others."""
        self.draw(self._drawn[:count], [])


_FRAME_S = 0.05
_SHARE = 0.05  # maximum share of time to spend on drawing, because the model needs the CPU
_NARROWEST = 12  # minimum width in columns; on narrower terminals, only finished rows are written


class MarkdownView:
    """Shows answers on stdout, which must be a terminal with a movable cursor.

    write  a function that sends characters to the terminal
    size   a function that returns the terminal's current number of columns and rows
    clock  a function that returns the time in seconds
    """

    def __init__(
        self,
        *,
        color: bool | None = None,
        write: Callable[[str], None] | None = None,
        size: Callable[[], tuple[int, int]] = lambda: shutil.get_terminal_size(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._color = can_color(sys.stdout, out.color) if color is None else color
        self._size = size
        self._clock = clock
        self._live = LiveRows(write or _to_stdout)
        self._reset()

    def _reset(self) -> None:
        self._pending = Pending(color=self._color)
        self._held = ""
        self._drawn: list[Row] = []
        self._next_frame = self._clock()

    def text(self, piece: str) -> None:
        """Add the next piece of the answer, exactly as the model generated it. The piece may be shown later."""
        piece = self._held + piece
        self._held = "\r" if piece.endswith("\r") else ""  # a trailing "\r" may be the first half of "\r\n"
        self._pending.source += visible(piece.removesuffix("\r").replace("\r\n", "\n"))
        if self._clock() >= self._next_frame:
            self._frame(is_open=True)

    def end(self) -> None:
        """Write the rest of the answer and leave the cursor in the first column."""
        self._pending.source += visible(self._held)
        self._frame(is_open=False)
        self._reset()

    def _frame(self, *, is_open: bool) -> None:
        began = self._clock()
        columns, lines = self._size()
        if any(columns_of(row) >= columns for row in self._drawn) and (kept := self._pending.leave()):
            # The terminal may have rewrapped the live rows, so the number of rows to move up is unknown.
            self._live.leave(kept)
        room = lines - 1 if columns >= _NARROWEST else 0
        done, self._drawn = self._pending.advance(max(1, columns - 1), room, is_open=is_open)
        self._live.draw(*([encoded(row, color=self._color) for row in rows] for rows in (done, self._drawn)))
        ended = self._clock()
        self._next_frame = ended + max(_FRAME_S, (ended - began) / _SHARE)


def _to_stdout(text: str) -> None:
    out.clear_progress()
    sys.stdout.write(text)
    sys.stdout.flush()
