"""The final check of a finished answer against its JSON Schema.

llguidance keeps an answer within its schema token by token, with a few exceptions: products of large numbers in the
schema overflow, and it treats U+FEFF as a visible character. So the text is parsed and validated once more. This
happens in an isolated process, because the answer and the schema are untrusted: a pattern such as `^(a+)+$` can keep
Python's `re` busy for years.

If a key occurs twice in one object, the last value counts, as in most parsers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, cast

from llmrun.engine.constraint.process import ConstraintProcess, one_line
from llmrun.engine.isolation.process import ProcessFailed, ProcessLimits

VerdictKind = Literal["valid", "invalid", "not validated"]

_TIMEOUT_S = 5.0
_WALL_PER_CPU_S = 5  # wall-clock seconds allowed per second of CPU time, for busy machines
_MEMORY = 512_000_000
_OUTPUT = 1 << 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of validating an answer. `reason` is one line that is safe to print; it is empty if valid.

    For invalid answers, it names the place as a JSON pointer, the problem, and the violated keyword in parentheses.
    """

    kind: VerdictKind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def validate(
    text: str, schema: object, *, timeout_s: float = _TIMEOUT_S, process: ConstraintProcess | None = None
) -> Verdict:
    """Parse an answer strictly and validate it. Never raises because of the text or the schema.

    schema     the parsed schema, or its JSON text
    timeout_s  CPU time limit
    process    a process to use, which stays open; without one, a process is started, which takes 200 ms

    Raises LlmrunError if the process cannot be started.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        return Verdict("not validated", f"the schema is not JSON: {one_line(str(error))}")
    used = process or ConstraintProcess()
    limits = ProcessLimits(timeout_s, timeout_s * _WALL_PER_CPU_S, _MEMORY, _OUTPUT)
    try:
        kind, reason = used.request({"text": text, "schema": parsed}, "verdict", limits)
    except ProcessFailed as failure:
        return Verdict("not validated", str(failure))
    finally:
        if process is None:
            used.close()
    return Verdict(cast("VerdictKind", kind), one_line(reason))


def problem_with(value: object, schema: object) -> str | None:
    """Return what is wrong with a JSON value, or None if it matches the schema or could not be validated."""
    verdict = validate(json.dumps(value), schema)
    return verdict.reason if verdict.kind == "invalid" else None
