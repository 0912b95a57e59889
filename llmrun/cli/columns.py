"""A table of plain text: columns as wide as they need to be, two blanks apart. Rich would take 60 ms to be imported."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmrun.cli.terminal import visible_line, width


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row; what would move the cursor is shown instead.

    right  the numbers of the columns that end at the same place
    """
    shown = [[visible_line(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(_padded(row, widths, right)).rstrip() for row in shown]


def _padded(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    cells = []
    for number, (cell, columns) in enumerate(zip(row, widths, strict=True)):
        blanks = " " * (columns - width(cell))
        cells.append(blanks + cell if number in right else cell + blanks)
    return cells
