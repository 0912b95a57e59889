"""Prepares markdown-it's tokens for Rich.

Text is made safe here, after parsing, because entities such as `&#27;` can produce control characters. The targets of
links and images are shown in parentheses after them, because Rich would hide a link's target in an escape sequence
and show images before their paragraph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markdown_it.token import Token

from llmrun.cli.chatting.markdown.parse import follows_blank
from llmrun.cli.chatting.markdown.rows import shown

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
    links: list[tuple[str, int]] = []  # each open link's target, and the index of the first child of its text
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
