"""Blocks of Markdown as rows of a terminal, and how many of those rows no further text can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.cli.chatting.markdown.code import Colors
from llmrun.cli.chatting.markdown.inline import inline, lines_of, without_beginning
from llmrun.cli.chatting.markdown.parse import DEEPEST, HEAD_OF_A_TABLE, Block, blocks_of
from llmrun.cli.chatting.markdown.rows import (
    BOLD,
    DIM,
    ITALIC,
    UNDERLINED,
    Row,
    Spans,
    folded,
    ink,
    plain,
    shown,
    styled,
    wrapped,
)
from llmrun.cli.chatting.markdown.table import table_rows

if TYPE_CHECKING:
    from markdown_it.token import Token

WIDEST_TEXT = 100  # columns; longer lines are hard to read. Code and tables may be wider
_NARROWEST = 8  # columns: what is nested deeper is no longer indented
_RULE = 30
_TAB = 4
_HEADINGS = {"h1": (BOLD, UNDERLINED), "h2": (BOLD,)}
_LOWER_HEADING = (BOLD, ITALIC)


@dataclass(slots=True)
class Rendered:
    """Rows, and what is certain about them while their text goes on.

    final    the first rows that stay as they are: nothing that follows changes or moves them
    certain  the weight of the text (see Row.weight) that stays, though another width would break it elsewhere;
             of a table that is nothing
    """

    rows: list[Row]
    final: int = 0
    certain: int = 0

    @classmethod
    def closed(cls, rows: list[Row]) -> Rendered:
        return cls(rows, len(rows), sum(row.weight for row in rows))

    def add(self, part: Rendered, *, certain: bool) -> None:
        """Put rows below; `certain`: everything above them is final."""
        if certain:
            self.final = len(self.rows) + part.final
            self.certain += part.certain
        self.rows.extend(part.rows)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What is known of a source whose beginning has been written to the screen and cut off.

    gap        a blank row comes first
    skip       characters at the beginning of a paragraph that stand for what is gone
    number     of a list's first item, None: as the source says
    code       whether the first line of a code block, which stays, has been written
    until      what ends the comment or string that the code's last line left open, see Colors
    """

    gap: bool = False
    skip: int = 0
    number: int | None = None
    code: bool = False
    until: tuple[str, str] | None = None


_WHOLE = Resumed()


@dataclass(slots=True)
class Layout:
    """Lays out the blocks of one source. Every `width` is in columns, every `is_open` says that text may follow."""

    source: str
    color: bool
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.source.split("\n")

    def open_from(self, blocks: Sequence[Block]) -> int:
        """The first of these siblings that the text to come may still change, when it may change the last one.

        That is the last one, or the one before, when the last one may yet turn out to be a part of it: after "text"
        the line "#" is an empty heading, and "#1" is more of that text; after a list "2" may be its next number.
        """
        last = len(blocks) - 1
        if last < 1:
            return last
        block = blocks[last]
        joins = self._may_dissolve(block) and not self._blank_before(block)
        return last - 1 if joins or (self._grows(block) and block.is_number) else last

    def block(self, block: Block, width: int, *, is_open: bool, resumed: Resumed = _WHOLE) -> Rendered:
        kind = block.kind
        if kind == "paragraph":
            return self._paragraph(block.inside[0], width, is_open=is_open, skip=resumed.skip)
        if kind in ("bullet_list", "ordered_list"):
            return self._list(block, width, is_open=is_open, number=resumed.number)
        if kind == "blockquote":
            return self._quote(block, width, is_open=is_open)
        if kind in ("fence", "code_block"):
            return self._code(block, width, is_open=is_open, resumed=resumed)
        if kind == "table":
            rows = table_rows(block, width, color=self.color)
        elif kind == "heading":
            rows = self._heading(block.token.tag, block.inside[0], width)
        elif kind == "hr":
            rows = [self._rule(width)]
        else:
            rows = [Row(part) for part in wrapped(((shown(block.token.content), ""),), width)]
        return Rendered(rows) if is_open else Rendered.closed(rows)

    # Containers

    def _below_one_another(
        self, blocks: Sequence[Block], render: Callable[[int, bool], Rendered], *, is_open: bool
    ) -> Rendered:
        """Siblings, with a blank row where the source has a blank line. `render` takes an index and `is_open`."""
        first_open = self.open_from(blocks) if is_open else len(blocks)
        whole = Rendered([])
        for at, block in enumerate(blocks):
            settled = at <= first_open
            if at and self._blank_before(block):
                leaves = is_open and self._may_dissolve(block)  # and may become our parent's next, the gap with it
                whole.add(Rendered([Row()]) if leaves else Rendered.closed([Row()]), certain=settled)
                settled = settled and not leaves
            whole.add(render(at, at >= first_open), certain=settled)
        return whole

    def _list(self, block: Block, width: int, *, is_open: bool, number: int | None) -> Rendered:
        items = blocks_of(block.inside)
        first = int(str(block.token.attrs.get("start", 1))) if number is None else number

        def item(at: int, item_is_open: bool) -> Rendered:
            marker = "• " if block.kind == "bullet_list" else f"{first + at}. "
            return self._item(items[at], ((marker, self._dim),), width, is_open=item_is_open)

        return self._below_one_another(items, item, is_open=is_open)

    def _item(self, item: Block, marker: Spans, width: int, *, is_open: bool) -> Rendered:
        """An item of a list beside its marker, or under it where there is no room."""
        size = len(plain(marker))
        if width - size < _NARROWEST:
            whole = Rendered([Row(marker)])
            whole.final = 0 if is_open else 1
            whole.certain = whole.rows[0].weight
            inside = self._inside(item, width, is_open=is_open)
            whole.add(inside, certain=inside.final > 0)
            return whole
        whole = self._inside(item, width - size, is_open=is_open)
        blank: Spans = ((" " * size, ""),)
        whole.rows = [Row(row.body, (blank if at else marker) + row.lead) for at, row in enumerate(whole.rows)]
        return whole

    def _quote(self, block: Block, width: int, *, is_open: bool) -> Rendered:
        if width - 2 < _NARROWEST:
            return self._inside(block, width, is_open=is_open)
        whole = self._inside(block, width - 2, is_open=is_open)
        whole.rows = [Row(row.body, (("│ ", self._dim), *row.lead)) for row in whole.rows]
        return whole

    def _inside(self, block: Block, width: int, *, is_open: bool) -> Rendered:
        inner = blocks_of(block.inside)
        if inner:
            return self._below_one_another(
                inner, lambda at, inner_is_open: self.block(inner[at], width, is_open=inner_is_open), is_open=is_open
            )
        # An empty item, or one nested deeper than the parser goes: then its text stands here as it was written.
        deep = block.token.level >= DEEPEST
        text = " ".join(line.strip() for line in self.lines[block.first : block.last]) if deep else ""
        rows = [Row(part) for part in wrapped(((shown(text), ""),), width)]
        return Rendered(rows) if is_open else Rendered.closed(rows)

    # Leaves

    def _paragraph(self, token: Token, width: int, *, is_open: bool, skip: int) -> Rendered:
        text = without_beginning(inline(token, color=self.color), skip)
        rows = [Row(part) for line in lines_of(text.spans) for part in wrapped(line, min(width, WIDEST_TEXT))]
        if not is_open:
            return Rendered.closed(rows)
        written = plain(text.spans)
        strictly = ink(written[: min(text.certain, _before_a_table(token.content, written))])
        bar = "|" in token.content.rpartition("\n")[2]
        return Rendered(rows, _followed(rows, strictly), strictly if bar else ink(written[: text.certain]))

    def _heading(self, tag: str, token: Token, width: int) -> list[Row]:
        spans = inline(token, color=self.color).spans
        if self.color:
            for style in _HEADINGS.get(tag, _LOWER_HEADING):
                spans = styled(spans, style)
        else:
            spans = (("#" * int(tag[1:]) + " ", ""), *spans)
        return [Row(part) for line in lines_of(spans) for part in wrapped(line, min(width, WIDEST_TEXT))]

    def _code(self, block: Block, width: int, *, is_open: bool, resumed: Resumed) -> Rendered:
        """Code in the first column between two rules, so that it can be copied. A line that has ended is one row,
        however long: the terminal breaks it, and a copy of it is still one line."""
        fenced = block.kind == "fence"
        lines = block.code_lines
        colors = Colors(block.language, color=self.color, until=resumed.until)
        whole = Rendered([])
        if fenced and not resumed.code:
            whole.add(Rendered.closed([self._rule(width, block.language)]), certain=True)
        ended = fenced and block.last - block.first == len(lines) + 2
        growing = is_open and not ended and block.last == len(self.lines)
        for line in lines[:-1] if growing else lines:
            whole.add(Rendered.closed([Row(colors.line(code_text(line)))]), certain=True)
        if growing and lines:
            text = code_text(lines[-1])
            rows = [Row(part) for part in folded(colors.line(text), width)]
            certain = ink(text) if text.strip("`~ ") else 0  # or the line may become the end of the block
            whole.add(Rendered(rows, 0, certain), certain=True)
        if fenced and (ended or not is_open):
            rows = [self._rule(width)]
            whole.add(Rendered(rows) if is_open else Rendered.closed(rows), certain=True)
        return Rendered(whole.rows) if is_open and self._grows(block) else whole

    def _rule(self, width: int, label: str = "") -> Row:
        beginning = f"── {label} " if label else ""
        rule = beginning + "─" * max(2, _RULE - len(beginning))
        return Row(lead=folded(((rule, self._dim),), width)[0])

    @property
    def _dim(self) -> str:
        return DIM if self.color else ""

    def _grows(self, block: Block) -> bool:
        """Whether the block begins on a line that has not ended yet."""
        return block.first == len(self.lines) - 1

    def _may_dissolve(self, block: Block) -> bool:
        """Whether there is no more of it than signs that the next character may make text of."""
        if block.kind == "table":
            return block.first == len(self.lines) - 2
        return block.is_bare and self._grows(block)

    def _blank_before(self, block: Block) -> bool:
        return block.first > 0 and not self.lines[block.first - 1].strip(" \t>")


def code_text(line: str) -> str:
    """A line of code as it is shown."""
    return shown(line.expandtabs(_TAB))


def _before_a_table(source: str, written: str) -> int:
    """How much of a paragraph's text stands before the line that the next one may make the head of a table."""
    *_, above, line = "", *source.split("\n")
    lines = 0
    if len(line) < HEAD_OF_A_TABLE or "|" in line[:HEAD_OF_A_TABLE]:
        lines = 1
        if "|" in above[:HEAD_OF_A_TABLE] and not line.strip(" \t|:-"):
            lines = 2
    end = len(written)
    for _ in range(lines):
        end = written.rfind("\n", 0, max(0, end))
    return end + 1 if lines else end


def _followed(rows: Sequence[Row], certain: int) -> int:
    """How many rows are followed by one that is certain to its end. Such a row is full: no word joins it any more."""
    weight = 0
    for at, row in enumerate(rows):
        weight += row.weight
        if weight > certain:
            return max(0, at - 1)
    return max(0, len(rows) - 1)
