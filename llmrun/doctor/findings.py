"""The result of a check: one line of text with its status, advice and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.errors import LlmrunError

OK = "ok"
NOTE = "note"  # worth knowing, but llmrun works
PROBLEM = "problem"  # llmrun does not work, or not with the current settings


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    section  the heading, such as "Python"
    name     a stable, unique name for programs; GPUs are numbered
    status   OK, NOTE or PROBLEM
    words    the text of the line
    advice   what to do, in a few words; "" if nothing needs to be done
    command  the exact command that follows the advice; "" if there is none
    facts    the data behind the line: text, numbers, lists of them, or None
    """

    section: str
    name: str
    status: str
    words: str
    advice: str = ""
    command: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def advice_of(error: LlmrunError) -> str:
    """Return an error's hint as a sentence, or "" if it has none."""
    hint = error.hint[:1].upper() + error.hint[1:]
    return hint if not hint or hint.endswith((".", "?", ":")) else f"{hint}."
