"""Markdown into blocks, by markdown-it, the parser of CommonMark; with what a stream and a terminal ask of it.

- Nothing later in a text changes what an earlier block means: link references and underlined headings are off (a
  paragraph followed by `---` is a paragraph and a rule, as models mean it), and a line that goes on for long without
  a bar heads no table.
- HTML is text.
- A backslash stays before brackets and punctuation that only LaTeX escapes: `\\(x^2\\)` is shown as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from llmrun.cli.chatting.markdown.rows import shown

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

DEEPEST = 18  # levels of nesting; the parser leaves out what is two deeper than this
HEAD_OF_A_TABLE = 40  # characters, in which a table's first line must have a bar
_MARKER = re.compile(r"#{1,6}\s|>|[-+*]\s|\d{1,9}[.)]\s|```|~~~")  # what a line cannot begin with to head a table
_NUMBER = re.compile(r"\d{1,9}[.)]?")
_LATEX = frozenset("()[]{}\\,;:!")


class Block(NamedTuple):
    """A token with what stands between it and its closing one; for a token without a closing one, nothing.

    first, last  its lines in the source, the second one exclusive
    """

    token: Token
    inside: Sequence[Token]
    first: int
    last: int

    @property
    def kind(self) -> str:
        return self.token.type.removesuffix("_open")

    @property
    def is_bare(self) -> bool:
        """Whether there is no text in it yet: a rule, the first line of a fence, a marker alone."""
        return not any(token.content for token in self.inside if token.type == "inline")

    @property
    def is_number(self) -> bool:
        """Whether it is a paragraph that may become the next item of a numbered list."""
        return self.kind == "paragraph" and _NUMBER.fullmatch(self.inside[0].content) is not None

    @property
    def language(self) -> str:
        """What a code block says it is, as it may be shown; "" when it does not say."""
        words = shown(self.token.info).split()
        return words[0] if words else ""

    @property
    def code_lines(self) -> list[str]:
        """The lines of a code block. A last line without an end is one too."""
        lines = self.token.content.split("\n")
        return lines if lines[-1] else lines[:-1]


def parsed(source: str) -> list[Block]:
    """The top blocks of a text, in order."""
    return blocks_of(_parser().parse(source))


def blocks_of(tokens: Sequence[Token]) -> list[Block]:
    """The blocks of one level."""
    blocks: list[Block] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        end = at
        if token.nesting == 1:
            end = next(i for i in range(at + 1, len(tokens)) if tokens[i].level == token.level)
        first, last = token.map or (0, 0)
        blocks.append(Block(token, tokens[at + 1 : end], first, last))
        at = end + 1
    return blocks


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": DEEPEST + 2})
    parser.enable(["table", "strikethrough"]).disable(["reference", "lheading", "html_block", "html_inline"])
    parser.inline.ruler.at("escape", _escape)
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    return parser


def _table(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    from markdown_it.rules_block import table

    begin = state.bMarks[first] + state.tShift[first]
    head = state.src[begin : min(state.eMarks[first], begin + HEAD_OF_A_TABLE)]
    return "|" in head and not _MARKER.match(head) and table(state, first, last, silent)


def _escape(state: StateInline, silent: bool) -> bool:
    from markdown_it.rules_inline import escape

    pair = state.src[state.pos : state.pos + 2]
    if len(pair) < 2 or pair[0] != "\\" or pair[1] not in _LATEX:
        return escape(state, silent)
    if not silent:
        state.pending += pair
    state.pos += 2
    return True
