"""Input and output for pipes and dumb terminals, without escape sequences or prompt_toolkit."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompt import LARGEST_TEXT
from llmrun.cli.chatting.blocks import QUOTES, is_unfinished
from llmrun.cli.chatting.screen import AnswerView, Meter
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor


class PlainTurns:
    """Reads turns from a stream. A turn is one line, or several lines in triple quotes.

    Lines are read as they arrive, so a program at the other end of the pipe can wait for each answer before it sends
    the next turn.
    """

    def __init__(self, stream: BinaryIO, *, interactive: bool) -> None:
        """Read from `stream`. If it is a dumb terminal (TERM=dumb), `interactive` is true and a prompt is shown."""
        self._stream = stream
        self._interactive = interactive
        self._lines = 0

    @property
    def interactive(self) -> bool:
        return self._interactive

    def read(self, meter: Meter, draft: str = "") -> str | None:
        """Read a turn. Raises UsageError if a line is too long or not UTF-8, or if a block is never closed."""
        try:
            return self._turn(f"{meter.context_used / meter.context_size:.0%} > " if meter.context_size else "> ")
        except KeyboardInterrupt:
            self._show_prompt("\n")
            raise

    def _turn(self, prompt: str) -> str | None:
        self._show_prompt(prompt)
        turn = self._line()
        if turn is None:
            self._show_prompt("\n")
            return None
        while is_unfinished(turn):
            self._show_prompt("... ")
            line = self._line()
            if line is None:
                raise UsageError(f"standard input: ended inside a {QUOTES} block")
            turn += f"\n{line}"
            if len(turn) > LARGEST_TEXT:
                raise UsageError(f"standard input: a block is larger than {LARGEST_TEXT >> 20} MiB")
        return turn

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield

    @contextmanager
    def lent(self) -> Iterator[None]:
        yield

    def restore(self) -> None:
        """Do nothing, because the terminal modes were never changed."""

    def close(self) -> None:
        """Do nothing, because the caller owns the stream."""

    def _show_prompt(self, prompt: str) -> None:
        if self._interactive:
            out.prompt(prompt)

    def _line(self) -> str | None:
        data = self._stream.readline(LARGEST_TEXT + 1)
        if not data:
            return None
        self._lines += 1
        if len(data) > LARGEST_TEXT:
            raise UsageError(f"standard input: line {self._lines} is larger than {LARGEST_TEXT >> 20} MiB")
        if self._lines == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input: line {self._lines} is not UTF-8: byte 0x{data[error.start]:02x}",
                hint="convert it with iconv -f latin1 -t utf8",
            ) from None


class PlainView:
    """Writes each answer unchanged to stdout, followed by a newline."""

    def begin(self) -> None:
        """Do nothing, because plain output requires no preparation."""

    def text(self, piece: str) -> None:
        out.answer(piece)

    def end(self) -> None:
        out.end_answer()


def answer_view() -> AnswerView:
    """Return the view for the current stdout: rendered Markdown on a terminal, and plain text elsewhere."""
    if can_move_cursor(sys.stdout):
        from llmrun.cli.chatting.markdown import MarkdownView

        return MarkdownView()
    return PlainView()
