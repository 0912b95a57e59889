"""An answer as it streams.

A finished block is written once and belongs to the terminal's scrollback. What may still change is drawn again in
place; of a block that is higher than the terminal, the last rows.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from llmrun.cli.chatting.markdown.live import LiveRows
from llmrun.cli.chatting.markdown.pending import Pending
from llmrun.cli.chatting.markdown.rows import Row, columns_of, encoded
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_color, visible

_FRAME_S = 0.05
_SHARE = 0.05  # of the time, at most, goes into drawing: the cores belong to the model
_NARROWEST = 12  # columns; below that, rows are written when they are done, and none is drawn


class MarkdownView:
    """Shows one answer after another on stdout, which has to be a terminal that can move its cursor.

    write  where the terminal's characters go
    size   columns and rows of the terminal now
    clock  seconds
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
        self.begin()

    def begin(self) -> None:
        """Begin an answer."""
        self._pending = Pending(color=self._color)
        self._held = ""
        self._drawn: list[Row] = []
        self._next_frame = self._clock()

    def text(self, piece: str) -> None:
        """The next piece of the answer, as the model wrote it. It is shown now, or with a later piece."""
        piece = self._held + piece
        self._held = "\r" if piece.endswith("\r") else ""  # perhaps the first half of a line's end
        self._pending.source += visible(piece.removesuffix("\r").replace("\r\n", "\n"))
        if self._clock() >= self._next_frame:
            self._frame(is_open=True)

    def end(self) -> None:
        """The answer is over: all of it is written, and the cursor is in the first column."""
        self._pending.source += visible(self._held)
        self._frame(is_open=False)
        self.begin()

    def _frame(self, *, is_open: bool) -> None:
        began = self._clock()
        columns, lines = self._size()
        if any(columns_of(row) >= columns for row in self._drawn) and (kept := self._pending.leave()):
            # Whether the terminal has broken these rows into more, and how many to go up, nobody knows.
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
