"""An answer as it streams.

Rows that no further text can change are written once and belong to the terminal's scrollback. What may still change
(the last rows of a paragraph, a table, an emphasis that has no end yet) is drawn again in place. Text that has been
written is cut off the source, so that a long answer costs as much per token at its end as at its beginning.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from llmrun.cli.chatting.markdown.layout import WIDEST_TEXT
from llmrun.cli.chatting.markdown.live import LiveRows
from llmrun.cli.chatting.markdown.parse import parsed
from llmrun.cli.chatting.markdown.pending import Pending, weight
from llmrun.cli.chatting.markdown.rows import Row, columns_of, encoded
from llmrun.cli.output import out
from llmrun.cli.terminal import can_color, visible

_FRAME_S = 0.05
_SHARE = 0.05  # of the time, at most, goes into drawing: the cores belong to the model
_ROOM_TO_GROW = 10  # columns that a word is expected to need
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
        parsed("")  # imports the parser: 20 ms that the first token should not wait for
        self.begin()

    def begin(self) -> None:
        """Begin an answer."""
        self._pending = Pending(self._color)
        self._held = ""
        self._drawn: list[Row] = []
        self._certain = 0  # of the weight of the rows drawn
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
        if any(columns_of(row) >= columns for row in self._drawn):
            self._leave_what_is_drawn(columns)
        done, alive, certain = self._pending.advance(max(1, columns - 1), is_open=is_open)
        room = lines - 1 if columns >= _NARROWEST else 0
        if alive and self._pending.source[-1:].strip():
            alive[-1] = without_growing_word(alive[-1], columns - 1)
        self._drawn = alive[-room:] if room > 0 else []
        self._certain = min(certain, weight(alive)) if len(self._drawn) == len(alive) else 0
        self._live.draw([encoded(row) for row in done], [encoded(row) for row in self._drawn])
        ended = self._clock()
        self._next_frame = ended + max(_FRAME_S, (ended - began) / _SHARE)

    def _leave_what_is_drawn(self, columns: int) -> None:
        """The terminal has become too narrow for the rows that are drawn. Whether it has broken them into more rows,
        and how many to go up, nobody knows: leave them, and go on below with the text that follows. Of a table nothing
        is certain: all of it is drawn again, and the rows erased are those that are ours in any case."""
        if not self._certain:
            return
        kept = len(self._drawn)
        while columns_of(self._drawn[kept - 1]) < columns and weight(self._drawn[: kept - 1]) >= self._certain:
            kept -= 1  # not certain, and still one row: this one can be drawn again
        self._live.leave(kept)
        self._pending.written += self._certain


def without_growing_word(row: Row, limit: int) -> Row:
    """The row less its last word, when that begins so near the end that it may soon have to jump to the next row. Rows
    then only grow, which also is what a terminal that is changing its width mixes up least."""
    text, style = row.body[-1] if row.body else ("", "")
    before, blank, _ = text.rpartition(" ")
    shorter = Row((*row.body[:-1], (before.rstrip(" "), style)), row.lead)
    limit = min(limit, WIDEST_TEXT)
    return shorter if blank and columns_of(shorter) + min(_ROOM_TO_GROW, limit // 4) > limit else row


def _to_stdout(text: str) -> None:
    out.clear_progress()
    sys.stdout.write(text)
    sys.stdout.flush()
