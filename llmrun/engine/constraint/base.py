"""Response formats, and the interface of the constraints that enforce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FormatKind(StrEnum):
    """The kinds of response formats, named as in vLLM."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format that an answer must have. It is untrusted and may be invalid until it has been compiled.

    text     the JSON schema, the regular expression, or the grammar in GBNF or Lark; unused for other kinds
    choices  the texts to choose from; only for CHOICE
    origin   the flag or field that it comes from, for error messages
    """

    kind: FormatKind
    text: str = ""
    choices: tuple[str, ...] = ()
    origin: str = "response_format"

    @property
    def schema(self) -> str | None:
        """The JSON schema that the answer must match, or None if the answer is not JSON."""
        if self.kind is FormatKind.JSON_OBJECT:
            return '{"type": "object"}'
        return self.text if self.kind is FormatKind.JSON_SCHEMA else None


class Constraint(Protocol):
    """The allowed continuations of one answer, as tokens. All methods raise LlmrunError if a limit is exceeded."""

    @property
    def is_complete(self) -> bool:
        """True once the text matches the format and nothing may follow it."""

    def allowed(self, into: NDArray[np.uint32]) -> None:
        """Write the mask of the tokens that may come next, uint32[mask_words].

        End-of-generation tokens are allowed if the text so far matches the format.
        """

    def take(self, token: int) -> None:
        """Add an allowed token to the text."""

    def back(self, n: int) -> None:
        """Remove the last n tokens."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next because there is no other choice. `allowed` then allows no others."""

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens of a sequence may come next, one after another."""
