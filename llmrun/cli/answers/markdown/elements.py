"""Renders Markdown as terminal rows with Rich, after making markdown-it's tokens safe.

The elements use only the terminal's own colors and no backgrounds, so answers are readable on both light and dark
terminals. Code starts in the first column and is not wrapped, so it can be copied.

Text is made safe here, after parsing, because entities such as `&#27;` can produce control characters. Links and
images are followed by their targets in parentheses, because Rich would hide a link's target in an escape sequence and
show images before their paragraph.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import ClassVar

from markdown_it.token import Token
from rich import box, markdown
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.containers import Renderables
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from llmrun.cli.answers.markdown.parse import follows_blank
from llmrun.cli.answers.markdown.rows import Row, rows_of, shown, wrapped

WIDEST_TEXT = 100  # maximum width in columns; longer lines are hard to read, but code and tables may be wider
_NARROWEST = 8  # minimum width in columns; narrower cells, list items and quotes would be unreadable
_RULE = 30  # width of a rule in columns
_LONGEST_LINE = 2000  # maximum number of characters; longer lines are probably data, and Pygments may be slow
_LONGEST_CODE = 50_000
_LANGUAGE = re.compile(r"[\w+#-]*")
_DIM = Style(dim=True)

_THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        **{f"markdown.h{level}": "bold italic" for level in range(3, 7)},
        "markdown.code": "cyan",
        "markdown.link_url": "dim underline",
        "markdown.block_quote": "none",
    }
)
_CODE_COLORS = ANSISyntaxTheme(
    {
        ("Comment",): _DIM,
        ("Comment", "Preproc"): Style(color="magenta"),
        ("Keyword",): Style(color="magenta"),
        ("Operator", "Word"): Style(color="magenta"),
        ("Name", "Decorator"): Style(color="magenta"),
        ("Name", "Tag"): Style(color="cyan"),
        ("Literal", "String"): Style(color="green"),
        ("Literal", "Number"): Style(color="cyan"),
        ("Generic", "Inserted"): Style(color="green"),
        ("Generic", "Deleted"): Style(color="red"),
        ("Generic", "Subheading"): Style(color="cyan"),
    }
)


class _Paragraph(markdown.Paragraph):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from wrapped(self.text, min(options.max_width, WIDEST_TEXT))


class _Heading(markdown.Heading):
    """A left-aligned heading without a box. If there is no color, the heading's `#` characters are shown."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        signs = "" if console.color_system else "#" * int(self.tag[1:]) + " "
        yield from wrapped(Text(signs) + self.text, min(options.max_width, WIDEST_TEXT))


class _CodeBlock(markdown.CodeBlock):
    """Code between two rules. The first rule shows the language. Indented code blocks have no rules."""

    def __init__(self, token: Token) -> None:
        super().__init__("", "")
        self._fenced = token.type == "fence"
        self._info = token.info

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _CodeBlock:
        return cls(token)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._fenced:
            label = f"── {self._info} " if self._info else ""
            yield _rule(options, label)
        # The last line, which may still grow, is not colored, so the cached highlighting of earlier lines stays valid.
        code, ended, growing = self.text.plain.rpartition("\n")
        if ended:
            language = _LANGUAGE.match(self._info) if console.color_system else None
            yield from _highlighted(code, language[0] if language else "", console)
        if growing:
            yield from (Segment(growing), Segment.line())
        if self._fenced:
            yield _rule(options)


@lru_cache(maxsize=4)
def _highlighted(code: str, language: str, console: Console) -> Sequence[Segment]:
    text = Text(code)
    if language and len(code) <= _LONGEST_CODE and max(map(len, code.split("\n"))) <= _LONGEST_LINE:
        colored = Syntax(code, language, theme=_CODE_COLORS).highlight(f"{code}\n")
        colored.right_crop(1)
        if colored.plain == code:  # ignore the colors if the lexer has changed the text
            text = colored
    return tuple(text.render(console, end="\n"))


def _rule(options: ConsoleOptions, label: str = "") -> Text:
    dashes = max(2, min(_RULE, options.max_width) - cell_len(label))
    return Text(label + "─" * dashes, _DIM, no_wrap=True, overflow="ignore")


class _Rule(markdown.HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _rule(options)


class _Blank(markdown.MarkdownElement):
    """A blank row, drawn for each blank line in the source of a list or a quote."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()


class _List(markdown.ListElement):
    def __init__(self, list_type: str, list_start: int | None) -> None:
        super().__init__(list_type, list_start)
        self._children: list[markdown.MarkdownElement] = []

    def on_child_close(self, context: markdown.MarkdownContext, child: markdown.MarkdownElement) -> bool:
        self._children.append(child)
        return False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        number = self.list_start or 0
        for child in self._children:
            if isinstance(child, markdown.ListItem):
                marker = "• " if self.list_type == "bullet_list_open" else f"{number}. "
                number += 1
                yield from _beside(marker, " " * len(marker), child.elements, console, options)
            else:
                yield child


class _Quote(markdown.BlockQuote):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _beside("│ ", "│ ", self.elements, console, options)


def _beside(first: str, others: str, elements: Renderables, console: Console, options: ConsoleOptions) -> RenderResult:
    """Draw elements with the marker `first` before the first row and the marker `others` before all other rows.

    If the terminal is too narrow, draw the elements below the marker. Rich's own list items are not used, because they
    truncate code that is wider than the terminal.
    """
    room = options.max_width - len(first)
    inside = console.render(elements, options.update(width=room if room >= _NARROWEST else options.max_width))
    lines = list(Segment.split_lines(inside))
    if room < _NARROWEST or not lines:
        yield Text(first, _DIM)
    for number, line in enumerate(lines):
        if room >= _NARROWEST:
            yield Segment(others if number else first, _DIM)
        yield from line
        yield Segment.line()


class _Table(markdown.TableElement):
    """A table with wrapped cells, or with one cell per line if the terminal is too narrow."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        body = [[cell.content for cell in row.cells] for row in self.body.rows] if self.body else []
        least = [min(_NARROWEST, max(map(cell_len, map(str, column)))) for column in zip(head, *body, strict=True)]
        if sum(least) + 3 * (len(least) - 1) > options.max_width:
            yield from _stacked(head, body, options.max_width)
            return
        table = Table(box=box.MINIMAL, show_edge=False, pad_edge=False, border_style=_DIM)
        for name, size in zip(head, least, strict=True):
            table.add_column(name, min_width=size, overflow="fold")
        for row in body:
            table.add_row(*row)
        yield table


def _stacked(head: Sequence[Text], body: Sequence[Sequence[Text]], limit: int) -> RenderResult:
    """Draw each cell on a line of its own, after its column's name. Separate the table's rows with blank lines."""
    for number, line in enumerate(body or [[]]):
        if number:
            yield Text()
        for name, cell in zip_longest(head, line):
            yield from wrapped(Text.assemble(name, ": ", cell) if name and cell is not None else name or cell, limit)


class _AnswerMarkdown(markdown.Markdown):
    elements: ClassVar[dict[str, type[markdown.MarkdownElement]]] = {
        **markdown.Markdown.elements,
        "paragraph_open": _Paragraph,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
        "blockquote_open": _Quote,
        "hr": _Rule,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "table_open": _Table,
        "blank": _Blank,
    }
    inlines = markdown.Markdown.inlines | {"link_url"}


class Renderer:
    """Renders Markdown blocks as terminal rows."""

    def __init__(self, *, color: bool) -> None:
        self._console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system="standard" if color else None,
            theme=_THEME,
            width=80,
            height=25,
            legacy_windows=False,
        )
        self._answer = _AnswerMarkdown("", hyperlinks=False)

    def rows(self, tokens: list[Token], width: int) -> list[Row]:
        """Render tokens from `prepared` as rows of at most `width` columns; code may be wider."""
        self._answer.parsed = tokens
        options = self._console.options.update(width=width, height=None)
        return rows_of(self._console.render(self._answer, options))


_TAB = 4
_BREAKS = ("softbreak", "hardbreak")  # both become line breaks, because models break lines intentionally
_EMPHASIS = ("strong", "em", "s")


def prepared(tokens: Sequence[Token], lines: Sequence[str], *, color: bool) -> list[Token]:
    """Return one block's tokens for Rich, with a `blank` token for each blank line inside the block.

    Without color, the markers for emphasis and code stay in the text, because the formatting would otherwise be lost.
    """
    result: list[Token] = []
    seen = {(tokens[0].map or (0, 0))[0]}
    for token in tokens:
        first = token.map[0] if token.map else None
        if first is not None and first not in seen:
            seen.add(first)
            if follows_blank(first, lines):
                result.append(Token("blank", "", 0))
        if token.type == "inline":
            token.children = list(_inline(token.children or [], color))
        elif token.type in ("fence", "code_block"):
            token.content = "\n".join(shown(line.expandtabs(_TAB)) for line in token.content.split("\n"))
            token.info = shown(token.info).strip()
        result.append(token)
    return result


def _inline(children: Sequence[Token], color: bool) -> Iterator[Token]:
    links: list[tuple[str, int]] = []  # each open link's target, and the index of the link text's first child
    for at, child in enumerate(children):
        if child.type in _BREAKS:
            yield Token("hardbreak", "br", 0)
        elif child.tag in _EMPHASIS and not color:
            yield _text(child.markup)
        elif child.tag in _EMPHASIS:
            yield child
        elif child.type == "link_open":
            links.append((shown(str(child.attrs["href"])), at + 1))
        elif child.type == "link_close":
            target, begin = links.pop()
            text = "".join(shown(inside.content) for inside in children[begin:at])
            if target not in (text, f"mailto:{text}"):  # an autolink already shows its target
                yield from _target(target)
        elif child.type == "image":
            text = "".join(shown(inside.content) for inside in child.children or [])
            yield _text(f"image: {text}" if text else "image:")
            yield from _target(shown(str(child.attrs["src"])))
        elif child.type == "code_inline":
            text = shown(child.content).replace("\n", " ")
            yield Token(child.type, "code", 0, content=text) if color else _text(f"`{text}`")
        else:
            yield _text(shown(child.content))


def _target(target: str) -> Iterator[Token]:
    """Yield tokens that show a link's target in parentheses."""
    yield _text(" (")
    yield Token("link_url", "link_url", 0, content=target)
    yield _text(")")


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)
