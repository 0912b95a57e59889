"""The wall between a chat and the person in front of it: where turns come from, and where answers are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Meter:
    """What a prompt may show of the conversation.

    model         what to call it; foreign text
    context_used  tokens that the conversation filled at the end of the last answer
    context_size  tokens it may fill; 0: a server has not said
    """

    model: str
    context_used: int
    context_size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One way to go on typing: `text` in place of the last `replaces` characters before the cursor.

    `about` says in a few words what it is. Both may be foreign text (a saved conversation's title).
    """

    text: str
    replaces: int
    about: str


Completions = Callable[[str], Sequence[Completion]]  # from what stands before the cursor


class Turns(Protocol):
    """Where the user's turns come from.

    interactive  a person types them and can try again: an error is told and the chat goes on. Otherwise (a pipe)
                 the first error ends it with its exit code
    """

    @property
    def interactive(self) -> bool: ...

    def read(self, meter: Meter, draft: str = "") -> str | None:
        '''The next turn as it was typed, without its last newline; None at the end of input.

        It may have several lines. A block that begins with `"""` is handed over whole, with its quotes:
        `blocks.is_unfinished(text)` says whether more lines belong to it. `draft` is a text to begin with, for the
        user to send or to edit. It is selected: what is typed first replaces it, be it a command or another question.
        Where nothing can be edited it is ignored.

        At Ctrl-C the line is cleared and another one is read. A KeyboardInterrupt that gets out of here starts a new
        prompt when `interactive`, and ends the chat with exit code 130 when not.
        '''

    def answering(self) -> AbstractContextManager[None]:
        """How the input behaves while an answer is computed and shown: keys are not echoed, Ctrl-C is a signal."""

    def lent(self) -> AbstractContextManager[None]:
        """While another program has the terminal: its modes are as they were found."""

    def restore(self) -> None:
        """Put the input's modes back as they were found, at once: called from a signal handler before the process
        is left without any more Python. Idempotent, raises nothing."""

    def close(self) -> None:
        """No more turns will be read. Idempotent."""


class AnswerView(Protocol):
    """Where answers are shown as they stream: one `begin`, any number of `text`, one `end` each."""

    def begin(self) -> None: ...

    def text(self, piece: str) -> None:
        """The next piece, as the model wrote it: control characters are the view's to make visible."""

    def end(self) -> None:
        """The answer is over; also after Ctrl-C and after an error, and when no text came. The next line written to
        the terminal, by whomever, begins in the first column."""
