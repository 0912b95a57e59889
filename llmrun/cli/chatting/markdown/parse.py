"""Splits an answer into blocks with markdown-it, and says which blocks no further text can change.

Some rules of Markdown are changed, to suit streams and what models mean:

- Link references and underlined headings are off, so that no text changes the meaning of an earlier block. `---` below
  a paragraph is a rule.
- A table's first line must have a bar among its first characters, and must not begin like another block.
- Cells beyond the last column of a table are kept in that column.
- HTML is text, and a backslash stays before what only LaTeX escapes: `\\(x^2\\)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_inline import StateInline, escape
from markdown_it.token import Token

HEAD_OF_A_TABLE = 40  # characters; a table's first line must have a bar among them
_DEEPEST = 18  # levels of nesting; markdown-it drops what is two levels deeper
_MARKER = re.compile(r"#{1,6}\s|>|[-+*]\s|\d{1,9}[.)]\s|```|~~~")
_NUMBER = re.compile(r"\d{1,9}[.)]?")
_BAR = re.compile(r"(?<!\\)\|")
_LATEX = frozenset("()[]{}\\,;:!")


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    """A top-level block, or one item of a top-level list.

    tokens     markdown-it's tokens, complete in themselves: an item is in a list of its own
    first      its first line in the source
    number     an item's number; meaningless for other blocks
    continues  whether it is an item, but not the first of its list
    """

    tokens: Sequence[Token]
    first: int
    number: int = 0
    continues: bool = False

    @property
    def kind(self) -> str:
        """`paragraph_open`, `fence`, `bullet_list_open` and so on."""
        return self.tokens[0].type

    @property
    def has_text(self) -> bool:
        """Whether it has text; a rule, the first line of a fence and a lone marker have none."""
        return any(token.content for token in self.tokens if token.type == "inline")


def blocks_of(source: str, continued: MarkdownBlock | None = None) -> list[MarkdownBlock]:
    """Parse a text into its blocks, in order. `continued` is the item that the text began with when it was cut."""
    lines = source.split("\n")
    blocks: list[MarkdownBlock] = []
    for tokens in _siblings(_parser().parse(source)):
        first, last = tokens[0].map or (0, 0)
        if any(token.level >= _DEEPEST for token in tokens):
            blocks.append(MarkdownBlock(_as_written(lines[first:last]), first))
        elif tokens[0].type in ("bullet_list_open", "ordered_list_open"):
            blocks.extend(_items(tokens, lines, None if blocks else continued))
        else:
            blocks.append(MarkdownBlock(tokens, first))
    return blocks


def first_unfinished(blocks: Sequence[MarkdownBlock], lines: Sequence[str]) -> int:
    """Return the index of the first block that more text may change; `lines` are the source's.

    It is the last block, or the one before it if the last may still become part of that: after "text", the line "#" is
    an empty heading, but "#1" continues the paragraph; after a list, "2" may become the next number.
    """
    last = len(blocks) - 1
    if last < 1:
        return last
    block = blocks[last]
    grows = block.first == len(lines) - 1
    undecided = block.first == len(lines) - 2 if block.kind == "table_open" else grows and not block.has_text
    number = grows and block.kind == "paragraph_open" and _NUMBER.fullmatch(block.tokens[1].content)
    return last - 1 if number or (undecided and not follows_blank(block.first, lines)) else last


def follows_blank(line: int, lines: Sequence[str]) -> bool:
    """Return whether a blank line precedes this one in the source."""
    return line > 0 and not lines[line - 1].strip(" \t>")


def _siblings(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Split one level into its parts: single tokens, and opening tokens up to their closing ones."""
    depth = begin = 0
    for at, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            yield tokens[begin : at + 1]
            begin = at + 1


def _items(tokens: Sequence[Token], lines: Sequence[str], continued: MarkdownBlock | None) -> Iterator[MarkdownBlock]:
    """Split a list into items, or keep it whole if an item is indented, as that may mean something else by itself."""
    opening, *inside, closing = tokens
    if continued is not None and continued.kind == opening.type:
        number, continues = continued.number, continued.continues
    else:
        number, continues = int(str(opening.attrs.get("start", 1))), False
    items = list(_siblings(inside))
    firsts = [(item[0].map or (0, 0))[0] for item in items]
    if any(lines[first][:1].isspace() for first in firsts):
        items, firsts = [inside], firsts[:1]
    for item, first in zip(items, firsts, strict=True):
        opened = copy(opening)
        opened.attrs, opened.map = {"start": number}, [first, first]
        yield MarkdownBlock([opened, *item, closing], first, number, continues)
        number, continues = number + 1, True


def _as_written(lines: Sequence[str]) -> Sequence[Token]:
    """Make a paragraph of source text that is nested too deeply to be parsed."""
    text = "\n".join(line.strip() for line in lines)
    content = Token("inline", "", 0, content=text, children=[Token("text", "", 0, content=text)])
    return [Token("paragraph_open", "p", 1), content, Token("paragraph_close", "p", -1)]


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _DEEPEST + 2})
    parser.enable(["table", "strikethrough"]).disable(["reference", "lheading", "html_block", "html_inline"])
    parser.inline.ruler.at("escape", _escape)
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    return parser


def _table(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    begin = state.bMarks[first] + state.tShift[first]
    head = state.src[begin : min(state.eMarks[first], begin + HEAD_OF_A_TABLE)]
    before = len(state.tokens)
    if "|" not in head or _MARKER.match(head) or not table(state, first, last, silent):
        return False
    for row in _siblings(state.tokens[before + 1 : -1]) if not silent else ():
        for line in _siblings(row[1:-1]):
            _keep_extra_cells(state, line)
    return True


def _keep_extra_cells(state: StateBlock, line: Sequence[Token]) -> None:
    """Put cells beyond the last column into that column; GFM drops them."""
    number = (line[0].map or (0, 0))[0]
    source = state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].strip()
    written = _BAR.split(source.removeprefix("|"))
    cells = [token for token in line if token.type == "inline"]
    extra = [cell.strip() for cell in written[len(cells) :]]
    if any(extra):
        cells[-1].content = " | ".join([cells[-1].content, *extra]).rstrip(" |")


def _escape(state: StateInline, silent: bool) -> bool:
    pair = state.src[state.pos : state.pos + 2]
    if len(pair) < 2 or pair[0] != "\\" or pair[1] not in _LATEX:
        return escape(state, silent)
    if not silent:
        state.pending += pair
    state.pos += 2
    return True
