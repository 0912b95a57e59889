"""What stands inside a paragraph: emphasis, code, links and images as styled text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.cli.chatting.markdown.rows import BOLD, DIM, ITALIC, STRUCK, UNDERLINED, Span, Spans, plain, shown

if TYPE_CHECKING:
    from markdown_it.token import Token

CODE = "36"
LINK = f"{DIM};{UNDERLINED}"

_EMPHASIS = {"strong": (BOLD, "**"), "em": (ITALIC, "*"), "s": (STRUCK, "~~")}
_BREAKS = ("softbreak", "hardbreak")  # a model that begins a new line wants one


@dataclass(frozen=True, slots=True)
class Inline:
    """Styled text with newlines in it.

    certain  how many of its characters no further text can change, though more may be added behind them
    """

    spans: Spans
    certain: int


def inline(token: Token, *, color: bool) -> Inline:
    """An `inline` token as text. Without color, the marks of Markdown stay, for nothing else tells emphasis."""
    spans = _Spans(color)
    certain: int | None = None
    depth = outermost = 0
    for child in token.children or []:
        if depth == 0:
            outermost = spans.length
        depth += child.nesting
        before = spans.length
        spans.add(child)
        if certain is None and (opening := _UNDECIDED.search(_decided(child))):
            # What has closed around it may come apart again: code spans are stronger than links and emphasis.
            inside = depth > 0 or child.type != "text"
            certain = outermost if inside else before + opening.start()
    if token.content.endswith(_MAY_GO_ON):
        certain = 0
    return Inline(tuple(spans.spans), spans.length if certain is None else certain)


# What is left of Markdown's signs in the text may still become markup: an opening one, a bracket, the beginning of a
# link or an entity. `5 * 3` and `snake_case` never do, nor does a bracket that was closed and not followed by `(`.
_UNDECIDED = re.compile(r"\*(?!\s)|~(?!\s)|(?<![^\W_])_(?!\s)|`|\[|[<&](?!\S*\s)")
_CLOSED_BRACKETS = re.compile(r"\[[^\[\]\\`<&]*\](?=[^(])")
# The next character may make these a longer run or a piece of something else.
_MAY_GO_ON = ("*", "_", "~", "`", "\\", "!", "&", "<", "]")


def _decided(token: Token) -> str:
    """The signs in a token that markup may still be made of."""
    if token.type == "image":
        return "`" if "`" in token.content else ""
    if token.type == "link_open":
        return "`" if any("`" in str(value) or "%60" in str(value) for value in token.attrs.values()) else ""
    if token.type != "text":
        return ""
    return _CLOSED_BRACKETS.sub(lambda match: "." * len(match[0]), token.content)


class _Spans:
    """Builds the text, one token after another."""

    def __init__(self, color: bool) -> None:
        self.spans: list[Span] = []
        self.length = 0
        self._color = color
        self._styles: list[str] = []
        self._links: list[tuple[str, int]] = []  # targets, and where their texts begin

    def add(self, token: Token) -> None:
        name = token.type.removesuffix("_open").removesuffix("_close")
        if name in _EMPHASIS:
            self._emphasis(token.nesting, *_EMPHASIS[name])
        elif token.type in _BREAKS:
            self._append("\n", "")
        elif token.type == "code_inline":
            self._marked(shown(token.content).replace("\n", " "), CODE, "`")
        elif token.type == "link_open":
            self._links.append((shown(str(token.attrs["href"])), self.length))
        elif token.type == "link_close":
            self._target(*self._links.pop())
        elif token.type == "image":
            alternative = "".join(shown(child.content) for child in token.children or [])
            self._text(f"image: {alternative}" if alternative else "image:")
            self._target(shown(str(token.attrs["src"])), self.length)
        else:
            self._text(shown(token.content))

    def _emphasis(self, nesting: int, style: str, mark: str) -> None:
        if not self._color:
            self._append(mark, "")
        elif nesting > 0:
            self._styles.append(style)
        else:
            self._styles.remove(style)

    def _marked(self, text: str, style: str, mark: str) -> None:
        if self._color:
            self._append(text, ";".join([*self._styles, style]))
        else:
            self._append(f"{mark}{text}{mark}", "")

    def _target(self, target: str, begin: int) -> None:
        """Where a link leads, in the open: never behind its text. An autolink's text says it already."""
        text = plain(self.spans)[begin:]
        if target not in (text, f"mailto:{text}"):
            self._text(" (")
            self._append(target, LINK if self._color else "")
            self._text(")")

    def _text(self, text: str) -> None:
        self._append(text, ";".join(self._styles))

    def _append(self, text: str, style: str) -> None:
        if text:
            self.spans.append((text, style))
            self.length += len(text)


def without_beginning(text: Inline, count: int) -> Inline:
    """The text less its first characters."""
    spans: list[Span] = []
    left = count
    for written, style in text.spans:
        if rest := written[left:]:
            spans.append((rest, style))
        left = max(0, left - len(written))
    return Inline(tuple(spans), max(0, text.certain - count))


def lines_of(spans: Sequence[Span]) -> list[Spans]:
    """Styled text cut at its newlines, blanks at both ends of each line gone."""
    lines: list[list[Span]] = [[]]
    for text, style in spans:
        first, *more = text.split("\n")
        lines[-1].append((first, style))
        lines.extend([(part, style)] for part in more)
    return [_stripped(line) for line in lines]


def _stripped(line: list[Span]) -> Spans:
    kept = [span for span in line if span[0]]
    while kept and not (text := kept[-1][0].rstrip(" ")):
        kept.pop()
    if kept:
        kept[-1] = (text, kept[-1][1])
    while kept and not (text := kept[0][0].lstrip(" ")):
        kept.pop(0)
    if kept:
        kept[0] = (text, kept[0][1])
    return tuple(kept)
