"""The result of one of the doctor's checks: a line of text with its status, advice and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.base.errors import LlmrunError

OK = "ok"
NOTE = "note"  # llmrun works, but the user should know this
PROBLEM = "problem"  # llmrun does not work, at least with the current settings


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    section  the heading, such as "Python"
    name     a stable, unique name that programs can rely on; names of GPUs end in a number
    status   OK, NOTE or PROBLEM
    words    the text of the line
    advice   what to do, in a few words; "" if nothing needs to be done
    command  the exact command that follows the advice; "" if there is none
    facts    the data behind the line; each value is text, a number, a list of those, or None
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
