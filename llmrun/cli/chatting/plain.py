"""The interfaces between a chat and its user, with an implementation for pipes and dumb terminals.

`Turns` is the source of turns, and `AnswerView` shows answers. The plain implementation uses neither escape sequences
nor prompt_toolkit. As in Ollama, a turn of several lines can be enclosed in triple quotes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from llmrun.base.errors import UsageError
from llmrun.base.folders import refuse_utf_16
from llmrun.cli.answers.markdown import markdown_view
from llmrun.cli.arguments.prompts import LARGEST_TEXT
from llmrun.cli.chatting.draft_images import without_signs
from llmrun.cli.console.output import out

QUOTES = '"""'

_OPENING = re.compile(rf"\s*(?:/\w+\s+)?{QUOTES}")  # a command's argument may also be a block


def is_unfinished(typed: str) -> bool:
    """Return whether the input opens a block and does not close it."""
    opening = _OPENING.match(typed)
    return opening is not None and not _closes(typed[opening.end() - len(QUOTES) :].rstrip())


def without_quotes(typed: str) -> str | None:
    """Return a block's text without the newlines next to the quotes, or None if the input is not a complete block."""
    block = typed.strip()
    if not block.startswith(QUOTES) or not _closes(block):
        return None
    return block[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def _closes(block: str) -> bool:
    return len(block) >= 2 * len(QUOTES) and block.endswith(QUOTES)


@dataclass(frozen=True, slots=True)
class Meter:
    """The parts of a conversation's state that a prompt may show.

    context_used  tokens in the context at the end of the last answer
    context_size  tokens that fit in the context, or 0 if the server has not reported it
    """

    context_used: int
    context_size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that replaces the last `replaces` characters before the cursor with `text`.

    `about` is a short description. `text` and `about` may be untrusted, such as the title of a saved conversation.
    """

    text: str
    replaces: int
    about: str


Completions = Callable[[str], Sequence[Completion]]  # the argument is the text before the cursor


class Turns:
    """The source of the user's turns. The default implementations suit sources that do not change the terminal.

    interactive  True if a person types the turns. The chat then shows errors and continues. If False, the input is a
                 pipe, and the first error ends the chat with the error's exit code
    edits_drafts  True if `read` shows drafts
    """

    interactive: bool
    edits_drafts = False

    def read(self, meter: Meter, draft: str = "") -> str | None:
        '''Read the next turn, without its final newline. Returns None at the end of input.

        A turn may span several lines. A block that begins with `"""` is returned as one turn, including the quotes. Use
        `is_unfinished(text)` to check whether the block has more lines.

        `draft` is text that the user can send or edit. The draft is selected at first, so typing replaces it. Sources
        without line editing ignore the draft.

        Ctrl-C clears the line and prompts again. If this method raises KeyboardInterrupt, an interactive chat
        prompts again, and any other chat ends with exit code 130.
        '''
        raise NotImplementedError

    def answering(self) -> AbstractContextManager[None]:
        """Return a context manager to use during an answer. Keys are not echoed, and Ctrl-C sends a signal."""
        return nullcontext()

    def lent(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the original terminal modes while another program runs."""
        return nullcontext()

    def restore(self) -> None:
        """Restore the original terminal modes immediately. This method is idempotent and never raises.

        The signal handler calls this method just before it exits without any further cleanup.
        """

    def close(self) -> None:
        """Release the input. After this call, no turns can be read. This method is idempotent."""


class AnswerView(Protocol):
    """Shows answers as they stream. For each answer, call `text` any number of times and `end` once."""

    def text(self, piece: str) -> None:
        """Show the next piece, which is raw model output. The view must make control characters visible."""

    def end(self) -> None:
        """End the answer and leave the cursor in the first column.

        This method is also called after Ctrl-C, after an error, and if there was no text.
        """


class PlainTurns(Turns):
    """Reads turns from a stream. A turn is one line, or several lines in triple quotes.

    Lines are read as they arrive, so a program at the other end of the pipe can wait for each answer before it sends
    the next turn.
    """

    def __init__(self, stream: BinaryIO, *, interactive: bool) -> None:
        """Read from `stream`. For a dumb terminal (TERM=dumb), `interactive` is true and a prompt is shown."""
        self.interactive = interactive
        self._stream = stream
        self._lines = 0

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

    def _show_prompt(self, prompt: str) -> None:
        if self.interactive:
            out.prompt(prompt)

    def _line(self) -> str | None:
        data = self._stream.readline(LARGEST_TEXT + 1)
        if not data:
            return None
        self._lines += 1
        if len(data) > LARGEST_TEXT:
            raise UsageError(f"standard input: line {self._lines} is larger than {LARGEST_TEXT >> 20} MiB")
        if self._lines == 1:
            refuse_utf_16(data, "standard input")
            data = data.removeprefix(codecs.BOM_UTF8)
        try:
            return without_signs(data.decode("utf-8").removesuffix("\n").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input: line {self._lines} is not UTF-8: byte 0x{data[error.start]:02x}",
                hint="convert it with iconv -f latin1 -t utf8",
            ) from None


class PlainView:
    """Writes each answer unchanged to stdout, followed by a newline."""

    def text(self, piece: str) -> None:
        out.answer(piece)

    def end(self) -> None:
        out.end_answer()


def answer_view() -> AnswerView:
    """Return the view for the current stdout: rendered Markdown on a terminal, and plain text elsewhere."""
    return markdown_view() or PlainView()
