"""What a stream can show, judged for each stream by itself, and how foreign text is made safe to look at."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from functools import lru_cache
from typing import TextIO

# A model, a file or a server may have written an escape sequence that moves the cursor, sets the clipboard or answers
# for the user. On a terminal every control character but newline and tab is shown as a picture of itself (U+2400 to
# U+2421); those without a picture are shown by number: the C1 ones, the two line separators that some programs break a
# line at, and the bidirectional embeddings, overrides and isolates, which show text in another order than it has.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES[0x7F] = "\u2421"
_PICTURES |= {code: f"<{code:02X}>" for code in range(0x80, 0xA0)}
_PICTURES |= {code: f"<{code:04X}>" for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))}
_ONE_LINE = _PICTURES | {ord("\n"): " ", ord("\t"): " "}
_IN_JSON = {code: f"\\u{code:04x}" for code in _PICTURES if code >= 0x7F}  # JSON itself spells the others


def visible(text: str) -> str:
    """Text with its control characters shown. One character at a time, so a sequence split over two tokens is too."""
    return text.translate(_PICTURES)


def visible_line(text: str) -> str:
    """`visible`, and on one line."""
    return text.translate(_ONE_LINE)


def visible_json(text: str) -> str:
    """JSON that means the same, with its control characters spelled: `\\u009b`."""
    return text.translate(_IN_JSON)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream directly."""
    return not stream.closed and stream.isatty()


def can_move_cursor(stream: TextIO) -> bool:
    """Whether a line may be overwritten in place."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def can_color(stream: TextIO, choice: str = "auto") -> bool:
    """Whether to color this stream: NO_COLOR, then the user's setting, then FORCE_COLOR, then what the stream is."""
    if os.environ.get("NO_COLOR") or choice == "never":
        return False
    if choice == "always" or os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return can_move_cursor(stream)


def columns() -> int:
    """Width of the terminal, 100 where there is none."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def room(stream: TextIO) -> int:
    """Columns that a line of this stream may take: any number where no person looks."""
    return columns() if is_terminal(stream) else sys.maxsize


def width(text: str) -> int:
    """Columns that text of one line takes. Where terminals differ (emoji of several characters), the most it may."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def shortened(text: str, limit: int) -> str:
    """The beginning of text that fits into `limit` columns."""
    taken = 0
    for end, character in enumerate(text):
        taken += _columns_of(character)
        if taken > limit:
            return text[:end]
    return text


@lru_cache(maxsize=4096)
def _columns_of(character: str) -> int:
    if character in _TWO_ON_SOME_TERMINALS:
        return 2
    if character == _EMOJI_STYLE:  # makes the narrow symbol before it a wide one
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != _SOFT_HYPHEN:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


_EMOJI_STYLE = "\ufe0f"
_SOFT_HYPHEN = "\u00ad"
_TWO_ON_SOME_TERMINALS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))  # the letters that flags are made of
