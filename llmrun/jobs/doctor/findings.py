"""The results of the doctor's checks, and the information about the machine that several checks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import LlmrunError

if TYPE_CHECKING:
    from llmrun.base.machine.system import Gpu

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


@dataclass
class Machine:
    """The machine to examine. If `offline` is true, no check uses the network."""

    offline: bool = False

    @cached_property
    def system(self) -> dict[str, Any]:
        from llmrun.base.machine.system import system_facts

        return system_facts()

    @cached_property
    def gpus(self) -> Sequence[Gpu]:
        from llmrun.base.machine.system import gpus

        return gpus()
