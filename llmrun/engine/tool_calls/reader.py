"""Reads streamed text with generators, which yield where they need more text.

Every generator method is called with `yield from`. Decisions depend only on the text itself and never on how the text
is split into chunks: if a decision depends on the next characters, the reader waits for these characters or the end.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from llmrun.base.errors import shown
from llmrun.engine.constraint.strict_json import parse

_T = TypeVar("_T")
Reading = Generator[None, None, _T]

_SPACE = " \t\r\n"


class Malformed(Exception):
    """The text is not a call in the expected format. The message states the reason."""


class Ended(Malformed):
    """The text ended in the middle of a call."""

    def __init__(self) -> None:
        super().__init__("the answer ended inside a call")


class Reader:
    """The text so far, and the position of the next character to read.

    ended  True once no more text will follow
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Drop the text that has been read. Earlier positions become invalid."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reading[bool]:
        """Wait for more text. Returns False at the end."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character without reading it. Raises Ended."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                raise Ended
        return self.text[self.at]

    def skip_space(self) -> Reading[None]:
        """Read whitespace, if there is any."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def found(self, options: Sequence[str]) -> Reading[tuple[str, int] | None]:
        """Return the longest of these texts that comes next and its end position, or None. Whitespace is ignored."""
        letters = {option: "".join(option.split()) for option in options}
        best: tuple[str, int] | None = None
        at, read = self.at, ""
        live = {option for option, text in letters.items() if text}
        while live:
            while at < len(self.text) and self.text[at] in _SPACE:
                at += 1
            if at >= len(self.text):
                if not (yield from self.more()):
                    break
                continue
            read += self.text[at]
            at += 1
            live = {option for option in live if letters[option].startswith(read)}
            complete = {option for option in live if letters[option] == read}
            if complete:
                best = min(complete), at
                live -= complete
        return best

    def match(self, *options: str) -> Reading[str | None]:
        """Read and return the longest of the given texts that comes next, or return None. Whitespace is ignored."""
        found = yield from self.found(options)
        if found is None:
            return None
        self.at = found[1]
        return found[0]

    def expect(self, text: str) -> Reading[None]:
        """Read the given text, ignoring whitespace. Raises Malformed if something else comes next."""
        if text.strip() and (yield from self.match(text)) is None:
            raise Ended if self.ended and self.at_end() else Malformed(f"expected {shown(text.strip(), 40)!r}")

    def at_end(self) -> bool:
        """Return True if the unread text so far is only whitespace."""
        return not self.text[self.at :].strip()

    def begins(self, text: str) -> Reading[bool]:
        """Return True if exactly the given text comes next."""
        while len(self.text) - self.at < len(text) and text.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                break
        return self.text.startswith(text, self.at)

    def pattern(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest match of a pattern. Every prefix of a match must also match the pattern."""
        start = self.at
        while True:
            match = pattern.match(self.text, start)
            self.at = match.end() if match else start
            if self.at < len(self.text) or not (yield from self.more()):
                return self.text[start : self.at]

    def until(self, *stops: str, longest: int | None = None) -> Reading[tuple[str, str]]:
        """Read up to and including the stop that ends first. Returns (text before the stop, stop). Raises Ended.

        Raises Malformed if the text before the stop is longer than `longest`.
        """
        start, seen = self.at, self.at
        width = max(map(len, stops))
        while True:
            places = [(place + len(stop), place, stop) for stop in stops if (place := self.text.find(stop, seen)) >= 0]
            if places:
                _, place, stop = min(places)
                if longest is not None and place - start > longest:
                    raise Malformed("a name is too long")
                self.at = place + len(stop)
                return self.text[start:place], stop
            if longest is not None and len(self.text) - start > longest + width:
                raise Malformed("a name is too long")
            seen = max(seen, len(self.text) - width + 1)
            if not (yield from self.more()):
                raise Ended

    def json_object(self) -> Reading[None]:
        """Read one JSON object. Raises Malformed."""
        start, depth, in_string = self.at, 0, False
        while depth or self.at == start:
            character = yield from self.peek()
            self.at += 1
            if character == '"':
                in_string = not in_string
            elif in_string and character == "\\":
                yield from self.peek()
                self.at += 1
            elif not in_string:
                depth += (character in "{[") - (character in "]}")
        try:
            parse(self.text[start : self.at])
        except (ValueError, RecursionError):
            raise Malformed("the arguments are not valid JSON") from None
