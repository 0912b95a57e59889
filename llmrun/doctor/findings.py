"""What a check says: one line, and what else is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.errors import LlmrunError

OK = "ok"
NOTE = "note"  # worth knowing; llmrun works all the same
PROBLEM = "problem"  # llmrun does not work, or not as it is set up


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    section  what it stands under: "Python"
    name     by which a program knows it: never changes, and is there once; a GPU has a number behind it
    status   OK, NOTE or PROBLEM
    words    the line
    advice   what can be done, in a few words; empty: nothing need be
    command  the exact command that does it, where there is one
    facts    what the line was made of: text, numbers, lists of them, or None
    """

    section: str
    name: str
    status: str
    words: str
    advice: str = ""
    command: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def advice_of(error: LlmrunError) -> str:
    """The hint of an error as a sentence; empty where it has none."""
    hint = error.hint[:1].upper() + error.hint[1:]
    return hint if not hint or hint.endswith((".", "?", ":")) else f"{hint}."
