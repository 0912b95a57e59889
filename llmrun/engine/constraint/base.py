"""Response formats."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

LLGUIDANCE: Final = "llguidance>=1.6,<2"  # the requirement to pass to pip; llguidance enforces formats


class FormatKind(StrEnum):
    """The kinds of response formats, named as in vLLM."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


class ResponseFormat(Struct, frozen=True):
    """The format that an answer must have. The format is untrusted and may be invalid until compiled.

    text     the JSON schema, the regular expression, or the grammar in GBNF or Lark; unused for other kinds
    choices  the texts to choose from; only for CHOICE
    origin   the flag or field that contained the format, for error messages
    strict   True if the objects of a JSON schema allow only declared properties, unless the schema says otherwise
    """

    kind: FormatKind
    text: str = ""
    choices: tuple[str, ...] = ()
    origin: str = "response_format"
    strict: bool = False

    @property
    def schema(self) -> str | None:
        """The JSON schema that the answer must match, or None if the answer is not JSON."""
        if self.kind is FormatKind.JSON_OBJECT:
            return '{"type": "object"}'
        return self.text if self.kind is FormatKind.JSON_SCHEMA else None
