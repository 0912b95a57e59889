"""Tracks the unfinished blocks of an answer, and how many of their rows on the screen can no longer be redrawn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markdown_it.token import Token

from llmrun.cli.answers.markdown.elements import WIDEST_TEXT, Renderer, prepared
from llmrun.cli.answers.markdown.parse import (
    HEAD_OF_A_TABLE,
    MarkdownBlock,
    blocks_of,
    first_unfinished,
    follows_blank,
)
from llmrun.cli.answers.markdown.rows import Row, columns_of, folded, ink, without_beginning, without_last_word

_LINES_CUT = 50
_ROOM_TO_GROW = 10  # expected width of a word in columns


class Pending:
    """The unfinished part of an answer. Text is appended at the end, and finished blocks are removed from the start.

    source  the remaining text, which starts with an unfinished top-level block
    """

    def __init__(self, *, color: bool) -> None:
        self.source = ""
        self._color = color
        self._renderer = Renderer(color=color)
        self._begun = False  # True once something has been written
        self._first: MarkdownBlock | None = None  # the block that starts `source`, if earlier blocks were dropped
        # the part of the first unfinished block's ink (see rows.py) that can no longer be redrawn; see `leave`
        self._left = ""
        self._drawn = ""  # the part of the first unfinished block's ink that is on the screen
        self._drawn_rows = 0
        self._gone = 0  # the number of rows of the first unfinished block that can no longer be redrawn

    def advance(self, width: int, room: int, *, is_open: bool) -> tuple[list[Row], list[Row]]:
        """Render the remaining text as rows of at most `width` columns. If `is_open` is false, the answer has ended.

        Returns the finished rows, which are written permanently, and up to `room` live rows, which are drawn below the
        finished rows until the next call.
        """
        lines = self.source.split("\n")
        blocks = blocks_of(self.source, self._first)
        self._drawn, self._drawn_rows = "", 0
        if not blocks:
            return [], []
        first_open = first_unfinished(blocks, lines) if is_open else len(blocks)
        done: list[Row] = []
        for block in blocks[:first_open]:
            rows = self._rows(block, lines, width)
            done += without_beginning(rows, self._covered("".join(map(ink, rows))))
            self._begun, self._left = True, ""
        alive: list[Row] = []
        if first_open < len(blocks):
            block = blocks[first_open]
            more, alive = self._unfinished(block, blocks[first_open + 1 :], lines, width, room)
            done += more
            if first_open:
                blank = [""] if follows_blank(block.first, lines) else []
                self.source, self._first = "\n".join([*blank, *lines[block.first :]]), block
            elif block.kind == "fence" and self._gone > _LINES_CUT:
                self._cut_code(block, lines, width)
        else:
            self.source, self._first = "", None
        return done, alive

    def leave(self) -> int:
        """Make the rows that were drawn last permanent, and return their number.

        Call this method when the terminal has become too narrow for these rows. The next rows continue after the
        permanent text, or at the first character of this text that has changed. Returns 0 for tables, because their
        layout depends on the width, and for blocks whose first rows are hidden.
        """
        if self._drawn:
            self._left = self._drawn
        return self._drawn_rows

    def _unfinished(
        self, block: MarkdownBlock, others: Sequence[MarkdownBlock], lines: list[str], width: int, room: int
    ) -> tuple[list[Row], list[Row]]:
        """Render the first unfinished block and the blocks that may merge with it. Return finished and live rows."""
        all_rows = self._rows(block, lines, width)
        if block.kind == "fence":
            all_rows.pop()  # drop the rule below the code
        whole = "".join(map(ink, all_rows))
        covered = self._covered(whole)
        rows = without_beginning(all_rows, covered)
        certain = _certain_rows(block, len(all_rows)) - (len(all_rows) - len(rows))
        below = [
            part for other in others for row in self._rows(other, lines, width, gap=True) for part in folded(row, width)
        ]
        drawn = [list(folded(row, width)) for row in rows]
        done: list[Row] = []
        while certain > 0 and sum(map(len, drawn)) + len(below) > room:
            covered += len(ink(rows[0]))
            self._left = whole[:covered]
            done.append(rows.pop(0))
            drawn.pop(0)
            certain -= 1
        self._gone = len(all_rows) - len(rows)
        alive = [part for parts in drawn for part in parts]
        if alive and not others and lines[-1][-1:].strip():
            alive[-1] = _without_growing_word(alive[-1], width)
        if block.kind != "table_open" and len(alive) + len(below) <= room:
            self._drawn = whole[:covered] + "".join(map(ink, alive))
            self._drawn_rows = len(alive)
        alive += below
        return done, alive[-room:] if room > 0 else []

    def _cut_code(self, block: MarkdownBlock, lines: list[str], width: int) -> None:
        """Drop the lines of code that are permanently on the screen, if the rest renders the same without them."""
        before = self._rows(block, lines, width)
        head = 1 if before[0] else 2  # rows above the code
        written = self._gone - head
        rest = [*lines[: block.first + 1], *lines[block.first + 1 + written :]]
        after = self._rows(blocks_of("\n".join(rest))[0], rest, width)
        if after[head:] == before[head + written :]:
            gone = sum(len(ink(row)) for row in before[: head + written])
            self.source, self._left = "\n".join(rest), "".join(map(ink, after[:head])) + self._left[gone:]

    def _rows(self, block: MarkdownBlock, lines: list[str], width: int, *, gap: bool = False) -> list[Row]:
        rows = self._renderer.rows(prepared(block.tokens, lines, color=self._color), width)
        if (self._begun or gap) and (not block.continues or follows_blank(block.first, lines)):
            rows.insert(0, [])
        return rows

    def _covered(self, text: str) -> int:
        """Return how many characters at the start of the block are permanently on the screen and still correct."""
        pairs = zip(self._left, text, strict=False)
        return next((at for at, (left, now) in enumerate(pairs) if left != now), min(len(self._left), len(text)))


# A character in _UNDECIDED may be markup, and the next character may extend an ending in _MAY_GO_ON.
_UNDECIDED = re.compile(r"[*_~`\[\]<&\\|]")
_MAY_GO_ON = ("*", "_", "~", "`", "!")


def _certain_rows(block: MarkdownBlock, rows: int) -> int:
    """Return how many rows at the start of an unfinished block can no longer change."""
    if block.kind == "fence":
        return rows - 1
    return rows - 2 if block.kind == "paragraph_open" and _is_decided(block.tokens[1]) else 0


def _is_decided(text: Token) -> bool:
    """Return whether a paragraph can only grow. If the last line may become a table header, return False."""
    if len(text.content.rpartition("\n")[2]) < HEAD_OF_A_TABLE or text.content.endswith(_MAY_GO_ON):
        return False
    for child in text.children or []:
        written = child.content if child.type == "text" else f"{child.content}{child.attrs or ''}"
        if child.type != "code_inline" and _UNDECIDED.search(written):
            return False
    return True


def _without_growing_word(row: Row, limit: int) -> Row:
    """Drop the last word if it is so close to the end of the row that it may soon wrap to the next row.

    Rows therefore only grow, which causes the fewest display errors when the terminal is resized.
    """
    limit = min(limit, WIDEST_TEXT)
    shorter = without_last_word(row)
    return shorter if shorter and columns_of(shorter) + min(_ROOM_TO_GROW, limit // 4) > limit else row
