"""The interfaces between a chat and its user, which are the source of turns and the view that shows answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Meter:
    """The state of a conversation, which a prompt may show.

    model         display name of the model, which is untrusted text
    context_used  tokens in the context at the end of the last answer
    context_size  tokens that fit in the context, or 0 if the server has not reported it
    """

    model: str
    context_used: int
    context_size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion. It replaces the `replaces` characters before the cursor with `text`.

    `about` is a short description. `text` and `about` may be untrusted, such as the title of a saved conversation.
    """

    text: str
    replaces: int
    about: str


Completions = Callable[[str], Sequence[Completion]]  # takes the text before the cursor


class Turns(Protocol):
    """The source of the user's turns.

    interactive  True if a person types the turns. The chat then shows errors and continues. If False, the input is a
                 pipe, and the first error ends the chat with the error's exit code
    """

    @property
    def interactive(self) -> bool: ...

    def read(self, meter: Meter, draft: str = "") -> str | None:
        '''Read the next turn, without its final newline. Returns None at the end of input.

        A turn may have several lines. A block that begins with `"""` is returned as one turn, including the quotes. Use
        `blocks.is_unfinished(text)` to check whether the block has more lines.

        `draft` is text that the user can send or edit. It is selected at first, so typing replaces it. Sources without
        line editing ignore it.

        Ctrl-C clears the line and prompts again. If this method raises KeyboardInterrupt anyway, an interactive chat
        prompts again, and any other chat ends with exit code 130.
        '''

    def answering(self) -> AbstractContextManager[None]:
        """Return a context manager to use during an answer. Keys are not echoed, and Ctrl-C sends a signal."""

    def lent(self) -> AbstractContextManager[None]:
        """Return a context manager that restores the original terminal modes while another program runs."""

    def restore(self) -> None:
        """Restore the original terminal modes immediately. Idempotent, and never raises.

        The signal handler calls this method just before it exits without any further cleanup.
        """

    def close(self) -> None:
        """Release the input. No more turns can be read. Idempotent."""


class AnswerView(Protocol):
    """Shows answers as they stream. For each answer, call `begin` once, `text` any number of times and `end` once."""

    def begin(self) -> None: ...

    def text(self, piece: str) -> None:
        """Show the next piece, which is raw model output. The view must make control characters visible."""

    def end(self) -> None:
        """End the answer and leave the cursor in the first column.

        This method is also called after Ctrl-C, after an error, and if there was no text.
        """
