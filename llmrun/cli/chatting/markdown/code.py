"""Colors for code, one line after another.

A line that is in the scrollback cannot be colored again, so a line's colors must follow from what stands before it.
Pygments, which looks ahead for the end of a string or a comment, cannot promise that, and takes 30 ms to import: the
few things that help reading (comments, strings, numbers, keywords) are told apart here, for the languages of
languages.py. Any other language is shown in one color. The terminal's own colors are used, and no background,
so that it can be read on light and on dark.
"""

from __future__ import annotations

import re
from functools import cache

from llmrun.cli.chatting.markdown.languages import Language, language_of
from llmrun.cli.chatting.markdown.rows import DIM, Span, Spans

COMMENT = DIM
STRING = "32"
KEYWORD = "35"
NUMBER = "36"
ADDED = "32"
REMOVED = "31"
PLACE = "36"

_LONGEST_LINE = 2000  # what is longer is data, and a line of quotes alone would take time by its square


class Colors:
    """Colors the lines of one code block. `until` is what ends the comment or string that a line left open."""

    def __init__(self, language: str, *, color: bool, until: tuple[str, str] | None = None) -> None:
        self._diff = color and language.lower() in ("diff", "patch")
        self._language = language_of(language) if color else None
        self.until = until

    def line(self, text: str) -> Spans:
        """The next line of the block, colored."""
        if self._diff:
            return _diff_line(text)
        if self._language is None or len(text) > _LONGEST_LINE:
            return ((text, ""),) if text else ()
        spans: list[Span] = []
        at = 0
        while at < len(text):
            if self.until is not None:
                style, closing = self.until
                at = self._to_the_end_of(closing, style, text, at, at, spans)
                continue
            sign = _signs(self._language).search(text, at)
            if sign is None:
                break
            spans.append((text[at : sign.start()], ""))
            at = self._sign(sign, text, spans)
        spans.append((text[at:], ""))
        return tuple(span for span in spans if span[0])

    def _sign(self, sign: re.Match[str], text: str, spans: list[Span]) -> int:
        """Take up what begins at a sign, and return where it ends."""
        language, kind = self._language, sign.lastgroup
        assert language is not None
        if kind == "opening":
            style, closing = _long(language)[sign[0]]
            return self._to_the_end_of(closing, style, text, sign.start(), sign.end(), spans)
        if kind == "comment":
            spans.append((text[sign.start() :], COMMENT))
            return len(text)
        if kind == "word":
            spans.append((sign[0], KEYWORD if sign[0] in language.keywords else ""))
        else:
            spans.append((sign[0], STRING if kind == "string" else NUMBER))
        return sign.end()

    def _to_the_end_of(self, closing: str, style: str, text: str, begin: int, search: int, spans: list[Span]) -> int:
        found = text.find(closing, search)
        end = len(text) if found < 0 else found + len(closing)
        self.until = (style, closing) if found < 0 else None
        spans.append((text[begin:end], style))
        return end


@cache
def _long(language: Language) -> dict[str, tuple[str, str]]:
    """What may go on over lines: by its beginning, its style and its end."""
    return {begin: (COMMENT, end) for begin, end in language.block} | {
        begin: (STRING, end) for begin, end in language.long_strings
    }


@cache
def _signs(language: Language) -> re.Pattern[str]:
    """Everything that is not plain text, in the order in which it is looked for."""
    openings = "|".join(map(re.escape, _long(language))) or "(?!)"
    comments = "|".join(rf"(?<!\S){re.escape(sign)}" if sign == "#" else re.escape(sign) for sign in language.comments)
    # A quote that is not closed on its line is an apostrophe, or the text is still growing.
    strings = "|".join(rf"{quote}(?:[^{quote}\\]|\\.)*{quote}" for quote in language.strings) or "(?!)"
    return re.compile(
        rf"(?P<opening>{openings})|(?P<comment>{comments or '(?!)'})|(?P<string>{strings})"
        r"|(?P<number>(?<![\w.])(?:0[xX][0-9a-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b)|(?P<word>[#@!]?[^\W\d]\w*)"
    )


def _diff_line(text: str) -> Spans:
    style = {"+": ADDED, "-": REMOVED, "@": PLACE}.get(text[:1], "")
    return ((text, style),) if text else ()
