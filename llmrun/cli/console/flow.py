"""Buffers a streamed answer, so that terminals receive whole words, and pipes and files whole lines."""

from __future__ import annotations

import io
import re
import select
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from llmrun.cli.console.terminal import columns, is_terminal, width

# POSIX guarantees that writes of up to this size to a pipe are atomic.
_ATOMIC = getattr(select, "PIPE_BUF", 512)  # maximum size of an atomic write in bytes
_TAB = 8  # width of a tab in columns

# A character of two columns, with any closing punctuation after it, counts as a word, because Chinese and Japanese do
# not use spaces. Closing punctuation must not begin a row.
WIDE = (
    r"\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
    r"\U00020000-\U0003fffd"
)
CLOSING = r"[、。，．：；！？）」』】〕〉》…]*"
_PIECE = rf"([ \t]*)(\n|[{WIDE}]{CLOSING}|[^ \t\n{WIDE}]+{CLOSING})"  # compiled on first use, which takes 4 ms
_FENCE = re.compile(r"(`{3,}|~{3,})[^`]*")


class WholeLines:
    """Buffers each line until it is complete, so that lines from concurrent processes do not mix."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def passed(self, text: str) -> str:
        """Add the next piece and return the text to write now."""
        lines, newline, begun = text.rpartition("\n")
        if not newline:
            self._held.append(text)
            return ""
        whole = f"{self.rest()}{lines}\n"
        self._held = [begun]
        return whole

    def rest(self) -> str:
        """Return the text that is still buffered at the end."""
        held = "".join(self._held)
        self._held = []
        return held


class WordWrap:
    """Breaks lines at spaces and buffers incomplete words, so that the terminal does not split words.

    Lines of fenced code and words longer than a row are left for the terminal to wrap, so that they can be copied
    without extra line breaks.

    limit  a function that returns the number of columns in a row
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._held = ""  # spaces and a possibly incomplete word
        self._column = 0
        self._fence = ""  # the fence that opened the current code block
        self._begins_line = True  # True until the first word of the line is written
        self._long = False  # True while a word longer than a row is being written

    def passed(self, text: str) -> str:
        """Add the next piece and return the text to write now."""
        return self._written(self._held + text, is_over=False)

    def rest(self) -> str:
        """Return the text that is still buffered at the end."""
        written = self._written(self._held, is_over=True) + self._held
        self._held, self._column = "", 0
        return written

    def _written(self, text: str, *, is_over: bool) -> str:
        limit = self._limit()
        written: list[str] = []
        end = 0
        for piece in re.finditer(_PIECE, text):
            blanks, word = piece[1], piece[2]
            may_go_on = piece.end() == len(text) and word != "\n" and not is_over
            if may_go_on and width(word) <= limit and not self._goes_on(blanks):
                break
            written.append(self._line_end(blanks, limit) if word == "\n" else self._word(blanks, word, limit))
            end = piece.end()
        self._held = text[end:]
        return "".join(written)

    def _goes_on(self, blanks: str) -> bool:
        """Return whether the next word continues a word that is already partly on the screen."""
        return self._long and not blanks

    def _line_end(self, blanks: str, limit: int) -> str:
        fits = self._behind(blanks) <= limit
        self._column, self._begins_line, self._long = 0, True, False
        return f"{blanks}\n" if fits else "\n"

    def _word(self, blanks: str, word: str, limit: int) -> str:
        if self._begins_line:
            self._look_for_fence(word)
        size = width(word)
        behind = self._behind(blanks) + size
        breaks = behind > limit >= size and not (self._begins_line or self._fence or self._goes_on(blanks))
        self._long = size > limit or self._goes_on(blanks)
        self._begins_line = False
        self._column = size if breaks else (behind - 1) % limit + 1
        return f"\n{word}" if breaks else blanks + word

    def _look_for_fence(self, word: str) -> None:
        if not self._fence:
            fence = _FENCE.fullmatch(word)
            self._fence = fence[1] if fence else ""
        elif word.startswith(self._fence) and not word.strip(self._fence[0]):
            self._fence = ""

    def _behind(self, blanks: str) -> int:
        """Return the cursor's column after writing these spaces and tabs."""
        column = self._column
        for blank in blanks:
            column = column + 1 if blank == " " else (column // _TAB + 1) * _TAB
        return column


Flow = WholeLines | WordWrap  # a flow decides when to write the pieces of streamed text


def flow_to(stream: TextIO) -> Flow:
    """Return a new flow for text that starts in the first column of the stream."""
    return WordWrap(columns) if is_terminal(stream) else WholeLines()


def atomic_writes(text: str) -> Iterator[str]:
    """Split text at line ends into atomic writes. A line over the limit becomes one write that is not atomic."""
    taken: list[str] = []
    size = 0
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        more = len(line.encode("utf-8", "backslashreplace"))
        if taken and size + more > _ATOMIC:
            yield "".join(taken)
            taken, size = [], 0
        taken.append(line)
        size += more
    if taken:
        yield "".join(taken)


def reader_is_gone(stream: TextIO) -> bool:
    """Return whether a pipe's reader has closed the pipe. Writing would then raise BrokenPipeError."""
    if sys.platform == "win32":
        return False
    watched = select.poll()
    try:
        watched.register(stream.fileno(), 0)
    except io.UnsupportedOperation:  # an in-memory stream has no file descriptor
        return False
    return any(event & select.POLLERR for _, event in watched.poll(0))
