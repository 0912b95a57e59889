"""Splits an answer into blocks with markdown-it, and determines which blocks can no longer change.

Some rules differ from standard Markdown, to support streaming and the way models write:

- Link references and underlined headings are disabled, because later text could otherwise change the meaning of an
  earlier block. `---` below a paragraph is a horizontal rule.
- The first line of a table must have a bar near its beginning and must not start like another kind of block.
- Extra cells in a table row are shown in the last column.
- HTML is shown as text. A backslash is shown if it precedes a character that only LaTeX escapes, as in `\\(x^2\\)`.
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

HEAD_OF_A_TABLE = 40  # a table's first line must have a bar within this many characters
_DEEPEST = 18  # blocks nested this deeply are not parsed; markdown-it drops content two levels deeper
_MARKER = re.compile(r"#{1,6}\s|>|[-+*]\s|\d{1,9}[.)]\s|```|~~~")
_NUMBER = re.compile(r"\d{1,9}[.)]?")
_BAR = re.compile(r"(?<!\\)\|")
_LATEX = frozenset("()[]{}\\,;:!")


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    """A top-level block, or one item of a top-level list.

    tokens     markdown-it's tokens, with opening and closing tokens; each item is wrapped in its own list
    first      index of the block's first line in the source
    number     number of the item; meaningless for blocks that are not list items
    continues  True for every item of a list except the first one
    """

    tokens: Sequence[Token]
    first: int
    number: int = 0
    continues: bool = False

    @property
    def kind(self) -> str:
        """The type of the block's first token, such as `paragraph_open`, `fence` or `bullet_list_open`."""
        return self.tokens[0].type

    @property
    def has_text(self) -> bool:
        """True if the block has text. Rules, opening fences and list markers alone have no text."""
        return any(token.content for token in self.tokens if token.type == "inline")


def blocks_of(source: str, continued: MarkdownBlock | None = None) -> list[MarkdownBlock]:
    """Parse text into blocks. If the text starts in the middle of a list, `continued` is the text's first item."""
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
    """Return the index of the first block that further text may change. `lines` are the lines of the source.

    The result is usually the last block's index. If the last block may still merge with the previous block, the index
    of the previous block is returned. For example, "#" after a paragraph is an empty heading, but "#1" continues the
    paragraph. After a list, "2" may be the start of the next item's number.
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
    """Return whether the line with index `line` follows a blank line in the source."""
    return line > 0 and not lines[line - 1].strip(" \t>")


def _siblings(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Split tokens into top-level groups. A group is one token, or an opening token up to its closing token."""
    depth = begin = 0
    for at, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            yield tokens[begin : at + 1]
            begin = at + 1


def _items(tokens: Sequence[Token], lines: Sequence[str], continued: MarkdownBlock | None) -> Iterator[MarkdownBlock]:
    """Split a list into items.

    A list with an indented item is not split, because the item could parse differently on its own.
    """
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
    """Return a paragraph with the unparsed source, for blocks that are nested too deeply."""
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
    """Append extra cells, which GitHub's Markdown would drop, to the last column."""
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
