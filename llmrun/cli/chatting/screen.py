"""The interfaces between a chat and its user: the source of turns, and the view that shows answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Meter:
    """The state of the conversation that a prompt may show.

    model         display name of the model, which is untrusted text
    context_used  tokens in the context at the end of the last answer
    context_size  tokens that fit in the context, or 0 if the server has not reported it
    """

    model: str
    context_used: int
    context_size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that replaces the last `replaces` characters before the cursor with `text`.

    `about` describes it in a few words. Both may be untrusted text, such as a saved conversation's title.
    """

    text: str
    replaces: int
    about: str


Completions = Callable[[str], Sequence[Completion]]  # takes the text before the cursor


class Turns(Protocol):
    """The source of the user's turns.

    interactive  True if a person types the turns. Errors are then shown and the chat continues. Otherwise the input is
                 a pipe, and the first error ends the chat with its exit code
    """

    @property
    def interactive(self) -> bool: ...

    def read(self, meter: Meter, draft: str = "") -> str | None:
        '''Read the next turn as typed, without its final newline. Returns None at the end of input.

        A turn may have several lines. A block that begins with `"""` is returned whole, including its quotes;
        `blocks.is_unfinished(text)` tells whether more lines belong to it.

        `draft` is text that the user can send or edit. It starts out selected, so typing replaces it. Inputs without
        line editing ignore it.

        Ctrl-C clears the line and reads another one. If a KeyboardInterrupt is raised anyway, an interactive chat
        prompts again, and any other chat ends with exit code 130.
        '''

    def answering(self) -> AbstractContextManager[None]:
        """Return a context manager for the time of an answer: keys are not echoed, and Ctrl-C sends a signal."""

    def lent(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the original terminal modes for another program."""

    def restore(self) -> None:
        """Restore the original terminal modes immediately. Idempotent, and never raises.

        The signal handler calls this right before it ends the process without running any more Python.
        """

    def close(self) -> None:
        """Release the input. No turns can be read afterwards. Idempotent."""


class AnswerView(Protocol):
    """Shows answers as they stream. Each answer is one `begin`, any number of `text` and one `end` calls."""

    def begin(self) -> None: ...

    def text(self, piece: str) -> None:
        """Show the next piece, exactly as the model wrote it. The view must make control characters visible."""

    def end(self) -> None:
        """End the answer and leave the cursor in the first column.

        This is also called after Ctrl-C, after an error, and if there was no text.
        """
