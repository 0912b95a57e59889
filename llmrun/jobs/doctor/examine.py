"""Runs the doctor's checks in order, and defines the findings of a check.

A failed check adds a line to the report and does not stop the other checks. Secrets are redacted, because people paste
the report into public issues. Facts about the machine that several checks share are looked up on first use.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import LlmrunError
from llmrun.hub.remote.huggingface import hub_token

if TYPE_CHECKING:
    from llmrun.base.machine.gpus import Gpu

OK = "ok"
NOTE = "note"  # The finding is information for the user.
PROBLEM = "problem"  # llmrun does not work, at least with the current settings.


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    section  the heading, such as "Python"
    name     a stable, unique name that programs can rely on; names of GPUs end in a number
    status   OK, NOTE or PROBLEM
    words    the text of the line
    advice   what to do, in a few words; "" if nothing needs to be done
    command  the exact command that follows the advice; "" if there is none
    facts    the data behind the line; each value is text, a number, a list of texts or numbers, or None
    """

    section: str
    name: str
    status: str
    words: str
    advice: str = ""
    command: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def advice_of(error: LlmrunError) -> str:
    """Return an error's hint as a sentence, or "" if the error has no hint."""
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
        from llmrun.base.machine.gpus import gpus

        return gpus()


_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|AUTHORIZATION")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_SHORTEST = 6  # characters; redacting shorter values would also hide ordinary words
_REDACTED = "[hidden]"


class Secrets:
    """The secrets found in the environment when the object was created."""

    def __init__(self) -> None:
        found = [value for name, value in os.environ.items() if _NAMES.search(name.upper())]
        found.append(hub_token() or "")
        # Longer secrets are replaced first, because a short secret may be a prefix of a longer secret.
        self._values = sorted({value for value in found if len(value) >= _SHORTEST}, key=len, reverse=True)

    def hidden(self, text: str) -> str:
        """Redact all secrets in a text, including user names and passwords in URLs."""
        for value in self._values:
            text = text.replace(value, _REDACTED)
        return _USER.sub(f"{_REDACTED}@", text)

    def hidden_in(self, finding: Finding) -> Finding:
        return replace(
            finding,
            words=self.hidden(finding.words),
            advice=self.hidden(finding.advice),
            command=self.hidden(finding.command),
            facts=self._of(finding.facts),
        )

    def _of(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, Mapping):
            return {key: self._of(one) for key, one in value.items()}
        return [self._of(one) for one in value] if isinstance(value, list | tuple) else value


Check = Callable[[Machine], Iterable[Finding]]

# (section, subject, module in this folder, function). Each module is imported just before its check runs, because the
# import itself may fail.
_CHECKS = (
    ("Python", "Python", "interpreter", "look_at_python"),
    ("Processor", "the processor", "processor", "look_at_processor"),
    ("Processor", "the kernels", "processor", "look_at_libraries"),
    ("Processor", "the instruction level", "processor", "look_at_level"),
    ("Processor", "how weights are prefetched", "processor", "look_at_prefetching"),
    ("Memory", "the memory", "processor", "look_at_memory"),
    ("Memory", "the speed of the memory", "processor", "measure_speed"),
    ("GPU", "GPUs", "graphics", "look_at_gpus"),
    ("llama.cpp", "llama.cpp", "graphics", "look_at_llama"),
    ("llama.cpp", "the RPC servers", "graphics", "look_at_rpc"),
    ("Files", "compiled kernels", "folders", "look_at_kernels"),
    ("Files", "the model folders", "folders", "look_at_folders"),
    ("Engines", "background engines", "engines", "look_at_engines"),
    ("Settings", "the settings", "folders", "look_at_settings"),
    ("Settings", "your models.toml", "folders", "look_at_own_models"),
    ("Network", "the network", "interpreter", "look_at_hub"),
)


@dataclass(slots=True)
class Report:
    """All findings in order, and the tracebacks of checks that raised unexpected errors."""

    findings: list[Finding] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)

    @property
    def works(self) -> bool:
        """True if llmrun works, which means that no check found a problem."""
        return not self.count(PROBLEM)


def examine(machine: Machine, doing: Callable[[str], None], more: Iterable[tuple[str, Check]] = ()) -> Report:
    """Run every check, which takes about two seconds in total.

    doing  called with a description of each check before it runs
    more   additional checks to run last, as (section, check)
    """
    report = Report()
    for section, what, module, function in _CHECKS:
        doing(f"checking {what}")
        report.findings += _findings_of(section, function, partial(_look, module, function, machine), report.traces)
    for section, check in more:
        report.findings += _findings_of(section, check.__name__, partial(check, machine), report.traces)
    secrets = Secrets()
    report.findings = [secrets.hidden_in(finding) for finding in report.findings]
    report.traces = [secrets.hidden(trace) for trace in report.traces]
    return report


def _look(module: str, function: str, machine: Machine) -> Iterable[Finding]:
    check: Check = getattr(import_module(f"llmrun.jobs.doctor.{module}"), function)
    return check(machine)


def _findings_of(
    section: str, name: str, look: Callable[[], Iterable[Finding]], traces: list[str]
) -> Iterator[Finding]:
    try:
        yield from look()
    except LlmrunError as error:
        yield Finding(section, f"failed_{name}", PROBLEM, str(error), advice_of(error))
    except Exception as error:  # noqa: BLE001 - a bug in one check must not hide the results of the others
        traces.append(traceback.format_exc())
        words = f"this check failed: {type(error).__name__}: {error}"
        yield Finding(
            section, f"failed_{name}", NOTE, words, "Run `llmrun doctor --debug`, and report its output as a bug."
        )
