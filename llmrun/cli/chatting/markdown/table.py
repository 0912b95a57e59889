"""A table as rows of a terminal: side by side where it fits, cells wrapped, and one cell a line where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from llmrun.cli.chatting.markdown.inline import inline
from llmrun.cli.chatting.markdown.parse import Block, blocks_of
from llmrun.cli.chatting.markdown.rows import BOLD, DIM, Row, Span, Spans, plain, styled, wrapped
from llmrun.cli.terminal import width

_BETWEEN = " │ "
_CROSSING = "─┼─"
_NARROWEST = 8  # columns that a cell is worth being read in


def table_rows(block: Block, limit: int, *, color: bool) -> list[Row]:
    """The rows of a `table` block, of at most `limit` columns each."""
    lines = [
        [_cell(cell, color) for cell in blocks_of(line.inside)]
        for part in blocks_of(block.inside)
        for line in blocks_of(part.inside)
    ]
    head, *body = lines
    sizes = _sizes(lines, limit)
    if sizes is None:
        return _stacked(head, body, limit)
    sides = [_side(cell) for cell in _cells(block)[: len(head)]]
    rule: list[Span] = [(_CROSSING.join("─" * size for size in sizes), DIM if color else "")]
    rows = _line([styled(cell, BOLD) if color else cell for cell in head], sizes, sides, color=color)
    rows.append(Row(lead=tuple(rule)))
    for line in body:
        rows.extend(_line(line, sizes, sides, color=color))
    return rows


def _cells(block: Block) -> list[Block]:
    return [c for part in blocks_of(block.inside) for line in blocks_of(part.inside) for c in blocks_of(line.inside)]


def _cell(block: Block, color: bool) -> Spans:
    return inline(block.inside[0], color=color).spans if block.inside else ()


def _side(cell: Block) -> str:
    """ "left", "right" or "center"."""
    return str(cell.token.attrs.get("style", "")).removeprefix("text-align:") or "left"


def _sizes(lines: Sequence[Sequence[Spans]], limit: int) -> list[int] | None:
    """Columns for each column of the table: what it needs, or less for the widest ones. None where it cannot fit."""
    sizes = [max(1, *map(width, map(plain, column))) for column in zip_longest(*lines, fillvalue=())]
    room = limit - len(_BETWEEN) * (len(sizes) - 1)
    if sum(sizes) <= room:
        return sizes
    # The widest columns give way first: all of them get the same, the others what they need.
    left, open_columns = room, len(sizes)
    share = 0
    for size in sorted(sizes):
        share = left // open_columns if open_columns else 0
        if size > share:
            break
        left -= size
        open_columns -= 1
    return [min(size, share) for size in sizes] if share >= _NARROWEST else None


def _line(cells: Sequence[Spans], sizes: Sequence[int], sides: Sequence[str], *, color: bool) -> list[Row]:
    """One line of the table, as many rows as its highest cell has."""
    columns = [wrapped(cell, size) for cell, size in zip(cells, sizes, strict=True)]
    between: Span = (_BETWEEN, DIM if color else "")
    rows = []
    for parts in zip_longest(*columns, fillvalue=()):
        spans: list[Span] = []
        for at, (part, size, side) in enumerate(zip(parts, sizes, sides, strict=True)):
            spare = size - width(plain(part))
            before = {"right": spare, "center": spare // 2}.get(side, 0)
            spans += [*([between] if at else []), (" " * before, ""), *part, (" " * (spare - before), "")]
        rows.append(Row(body=tuple(spans)))
    return rows


def _stacked(head: Sequence[Spans], body: Sequence[Sequence[Spans]], limit: int) -> list[Row]:
    """Every cell on a line of its own, after the name of its column; a blank row between the table's lines."""
    rows: list[Row] = []
    for line in body or [()]:
        rows.extend([Row()] if rows else [])
        for name, cell in zip_longest(head, line, fillvalue=()):
            spans: Spans = (*name, (": ", ""), *cell) if name and body else name or cell
            rows.extend(Row(body=part) for part in wrapped(spans, limit))
    return rows
