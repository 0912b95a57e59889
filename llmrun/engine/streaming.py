"""Decodes the bytes of tokens into text that can be shown: complete characters, without any stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


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

        Sets `stopped_by` when a stop string is complete. Do not call `feed` again after that.
        """
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """End the answer and return the buffered text, up to a stop string if it contains one."""
        text = self._release(self._utf8.decode(b"", True))
        if self.stopped_by is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        start = self._find_stop(text)
        keep = start if start is not None else len(text) - self._possible_stop(text)
        self._held = text[keep:] if start is None else ""
        return text[:keep]

    def _find_stop(self, text: str) -> int | None:
        """Return the start of the stop string that ends first, or None, and set `stopped_by` to that string."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, self.stopped_by = min(found)
        return start

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
