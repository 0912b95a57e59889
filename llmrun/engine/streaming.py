"""Bytes of tokens become text that may be shown: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StreamingDecoder:
    """Decodes one answer token by token.

    Bytes of an unfinished UTF-8 character are held until it is whole; bytes that can never become one are U+FFFD,
    as in `bytes.decode("utf-8", "replace")`. Text that may be the beginning of a stop string is held until it turns
    out not to be. Of several stop strings the one completed first counts, and of two completed by the same
    character the longer one: how the text is cut into tokens makes no difference.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, data: bytes) -> str:
        """Take the bytes of one token; return the text now certain. `stopped_by` is set once a stop string is whole;
        nothing may be fed after that."""
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """The answer is over: return what is still held, unless it completes a stop string."""
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
        """Where the stop string that is completed first begins; remembers which one it is."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, self.stopped_by = min(found)
        return start

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of text with which a stop string begins."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
