"""The part of an answer that is not on the screen for good, and what of it can be written now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from llmrun.cli.chatting.markdown.code import Colors
from llmrun.cli.chatting.markdown.layout import Layout, Rendered, Resumed, code_text
from llmrun.cli.chatting.markdown.parse import HEAD_OF_A_TABLE, Block, blocks_of, parsed
from llmrun.cli.chatting.markdown.rows import Row, ink, plain
from llmrun.cli.terminal import width as columns

_CUT_AT = 500  # characters of the source; parsing and laying out that much takes half a millisecond
_NEEDLE = 24  # characters by which a row is found in the source, ...
_ROWS_TRIED = 4  # ... and where it is looked for before giving up: text may be in several places, and hidden by signs
_PLACES_TRIED = 8
_UNSAFE_ENDS = frozenset("*_~`[]()!<>&\\|")  # what stands before a cut decides what a sign behind it means


class Progress(NamedTuple):
    """done     rows that nothing can change any more, to be written once
    alive    rows below them, to be drawn
    certain  the weight of those that are alive whose text will be the same, though it may be broken elsewhere
    """

    done: list[Row]
    alive: list[Row]
    certain: int


@dataclass(slots=True)
class Pending:
    """Source that grows at its end, and is cut off at its beginning when that is written.

    source   what is left; it begins with the block that is being written
    resumed  what is gone of that block
    written  the weight of the block's first rows, of those that its source still has, that have been written
    """

    color: bool
    source: str = ""
    resumed: Resumed = field(default_factory=Resumed)
    written: int = 0
    _cut_at: int = _CUT_AT

    def advance(self, width: int, *, is_open: bool) -> Progress:
        """Lay out what is left. `is_open`: more text may come; otherwise all of it is done."""
        blocks = parsed(self.source)
        if not blocks:
            return Progress([], [], 0)
        layout = Layout(self.source, self.color)
        first_open = layout.open_from(blocks) if is_open else len(blocks)
        if first_open > 0:
            done = self._close(layout, blocks[:first_open], width)
            self.source = "\n".join(layout.lines[blocks[first_open].first :]) if is_open else ""
            self.resumed, self.written, self._cut_at = Resumed(gap=True), 0, _CUT_AT
            rest = self.advance(width, is_open=is_open)
            return Progress(done + rest.done, rest.alive, rest.certain)
        first = _rendered(layout, blocks[0], width, self.resumed, is_open=True)
        fresh = _without(first.rows, self.written)
        final = max(0, first.final - (len(first.rows) - len(fresh)))
        done, alive = fresh[:final], fresh[final:]
        self.written += weight(done)
        certain = min(weight(alive), max(0, first.certain - self.written)) if len(blocks) == 1 else 0
        for block in blocks[1:]:
            alive += _rendered(layout, block, width, Resumed(gap=True), is_open=True).rows
        if len(blocks) == 1 and len(self.source) >= self._cut_at:
            self._cut(layout, blocks[0], first, width)
        return Progress(done, alive, certain)

    def _close(self, layout: Layout, blocks: list[Block], width: int) -> list[Row]:
        rows: list[Row] = []
        for at, block in enumerate(blocks):
            resumed = Resumed(gap=True) if at else self.resumed
            rows += _rendered(layout, block, width, resumed, is_open=False).rows
        return _without(rows, self.written)

    def _cut(self, layout: Layout, block: Block, before: Rendered, width: int) -> None:
        """Cut off what is written of a long block. A cut is believed when the rest has the same rows as before."""
        for source, resumed in _cuts(layout, block, before, self.resumed):
            blocks = parsed(source)
            if len(blocks) != 1:
                continue
            after = _rendered(Layout(source, self.color), blocks[0], width, resumed, is_open=True)
            gone = len(before.rows) - len(after.rows)
            lost = weight(before.rows[:gone])
            same = gone > 0 and after.rows == before.rows[gone:] and after.final == before.final - gone
            if same and lost <= self.written:
                self.source, self.resumed = source, resumed
                self.written -= lost
                break
        self._cut_at = len(self.source) + _CUT_AT


def weight(rows: list[Row]) -> int:
    return sum(row.weight for row in rows)


def _rendered(layout: Layout, block: Block, width: int, resumed: Resumed, *, is_open: bool) -> Rendered:
    part = layout.block(block, width, is_open=is_open, resumed=resumed)
    if not resumed.gap:
        return part
    gap = Rendered.closed([Row()])
    gap.add(part, certain=True)
    return gap


def _without(rows: list[Row], written: int) -> list[Row]:
    """The rows less their first ones of that weight. After a change of width that may end in the middle of a row."""
    for at, row in enumerate(rows):
        if written <= 0:
            return rows[at:]
        if row.weight > written:
            return [_rest_of(row, written), *rows[at + 1 :]]
        written -= row.weight
    return []


def _rest_of(row: Row, written: int) -> Row:
    """The row behind its first characters, as many as are written; blanks stand where its lead was."""
    body = []
    for text, style in row.body:
        begin = 0
        while written and begin < len(text):
            written -= ink(text[begin])
            begin += 1
        if rest := text[begin:]:
            body.append((rest, style))
    return Row(tuple(body), ((" " * columns(plain(row.lead)), ""),))


def _cuts(layout: Layout, block: Block, rendered: Rendered, resumed: Resumed) -> Iterator[tuple[str, Resumed]]:
    """Sources that the block may go on with, and what has to be known of what is gone."""
    if block.kind in ("bullet_list", "ordered_list"):
        items = blocks_of(block.inside)
        gone = layout.open_from(items)
        first = int(str(block.token.attrs.get("start", 1))) if resumed.number is None else resumed.number
        yield "\n".join(layout.lines[items[gone].first :]), Resumed(number=first + gone)
    elif block.kind == "fence":
        yield _code_cut(layout, block, resumed)
    elif block.kind == "paragraph":
        yield from _paragraph_cuts(layout, rendered, resumed)


def _code_cut(layout: Layout, block: Block, resumed: Resumed) -> tuple[str, Resumed]:
    """The line that opens the block, and the line that is growing."""
    opening, *lines = layout.lines[block.first :]
    colors = Colors(block.language, color=layout.color, until=resumed.until)
    for line in block.code_lines[: len(lines) - 1]:
        colors.line(code_text(line))
    return f"{opening}\n{lines[-1] if lines else ''}", Resumed(code=True, until=colors.until)


def _paragraph_cuts(layout: Layout, rendered: Rendered, resumed: Resumed) -> Iterator[tuple[str, Resumed]]:
    """Behind the rows that are final. A word stands in for what is gone, so that what follows still is a paragraph."""
    for row in range(rendered.final, max(0, rendered.final - _ROWS_TRIED), -1):
        rest = rendered.rows[row:]
        needle = rest[0].body[0][0][:_NEEDLE] if rest and rest[0].body else ""
        end = len(layout.source) - sum(len(plain(part.body)) for part in rest) + len(needle)
        for _ in range(_PLACES_TRIED if needle else 0):
            at = layout.source.rfind(needle, 1, end)
            if at < 0:
                break
            before = layout.source[at - 1]
            if before not in _UNSAFE_ENDS:
                word = "A" * HEAD_OF_A_TABLE + before
                yield word + layout.source[at:], Resumed(skip=len(word))
            end = at + len(needle) - 1
