"""Decodes the bytes of tokens into text that can be shown: complete characters, without any stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class StreamingDecoder:
    """A decoder for one answer, fed token by token.

    The bytes of an incomplete UTF-8 character are buffered until the character is complete. Invalid bytes become
    U+FFFD, as in `bytes.decode("utf-8", "replace")`. Text that may be the beginning of a stop string is buffered until
    it can no longer become one. If several stop strings match, the one that ends first wins; if two end at the same
    character, the longer one wins. The result therefore does not depend on how the text is split into tokens.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, data: bytes) -> str:
        """Add the bytes of one token and return the text that can be shown.

        Sets `stopped_by` when a stop string is complete, after which `feed` must not be called again.
        """
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """End the answer and return the buffered text, but only up to a stop string."""
        text = self._release(self._utf8.decode(b"", True))
        if self.stopped_by is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        found = first_completed(text, self._stop)
        if found is None:
            keep = len(text) - length_begun(text, self._stop)
            self._held = text[keep:]
        else:
            keep, self.stopped_by = found
            self._held = ""
        return text[:keep]


def first_completed(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return (start, mark) of the mark that ends first, or None.

    If two marks end at the same character, the longer one wins. The result therefore does not depend on how the text
    is chunked.
    """
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    _, start, mark = min(found)
    return start, mark


def length_begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
