"""The isolated process for constrained output, which validates finished answers and compiles every grammar first.

llguidance keeps an answer within its schema token by token, with a few exceptions: products of large numbers in the
schema overflow, and U+FEFF counts as a visible character. The text is therefore parsed and validated once more, in
an isolated process, because the answer and the schema are untrusted: a pattern such as `^(a+)+$` can keep
Python's `re` busy for years.

If a key occurs twice in one object, the last value counts, as in most parsers.
"""

from __future__ import annotations

import json
import signal
from typing import Any, Literal, cast

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.errors import shown
from llmrun.base.processes.frames import encoded
from llmrun.base.processes.limits import TOO_DEEP, IsolatedProcess, ProcessFailed, ProcessLimits

_MEMORY_PER_BYTE = 60  # memory per byte of a request; nested JSON of short values takes 50 bytes per byte of text
_REASON_LENGTH = 300
_ABORTED = (-6, 0xC0000409)  # SIGABRT, and STATUS_STACK_BUFFER_OVERRUN, which Windows uses for `abort`
_STACK_OVERFLOWS = (-signal.SIGSEGV, -10, 0xC00000FD)  # SIGBUS on macOS, and STATUS_STACK_OVERFLOW on Windows


class ConstraintProcess(IsolatedProcess):
    """The process that handles the schemas and answers of one model. Not thread-safe.

    The process is started by `start` or on first use, which takes 60 ms. Imports in the first request take 40 to 90 ms.
    """

    def __init__(self) -> None:
        super().__init__("engine.constraint.validation_worker", "structured output")

    def value(self, content: dict[str, Any], wanted: str, limits: ProcessLimits) -> Any:
        """Send a request and return the answer's value. Raises ProcessFailed unless the answer's kind is `wanted`."""
        try:
            request = encoded(content)
        except RecursionError:
            raise ProcessFailed(TOO_DEEP) from None
        memory = max(limits.memory, self._memory, len(request) * _MEMORY_PER_BYTE)
        limits = replace(limits, memory=memory)
        try:
            return self.request(request, limits, (wanted,))[1]
        except ProcessFailed as failure:
            raise _explained(failure, limits) from None


def one_line(words: str) -> str:
    """Return at most 300 characters on one line that is safe to print. Escapes count toward the limit."""
    return shown(shown(" ".join(words.split()), _REASON_LENGTH), _REASON_LENGTH)


def _explained(failure: ProcessFailed, limits: ProcessLimits) -> ProcessFailed:
    """Explain an exit status: Rust aborts if an allocation fails, and a stack overflow causes a fault."""
    if failure.status in _ABORTED:
        return ProcessFailed(limits.out_of_memory)
    return ProcessFailed(TOO_DEEP) if failure.status in _STACK_OVERFLOWS else failure


VerdictKind = Literal["valid", "invalid", "not validated"]

_TIMEOUT_S = 5.0
_WALL_PER_CPU_S = 5  # wall-clock seconds allowed per second of CPU time, for busy machines
_MEMORY = 512_000_000
_OUTPUT = 1 << 16


class Verdict(Struct, frozen=True):
    """The result of validating an answer. `reason` is one line that is safe to print, or empty for valid answers.

    For invalid answers, `reason` contains the place as a JSON pointer, the problem, and the violated keyword.
    """

    kind: VerdictKind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def validate(
    text: str, schema: object, *, timeout_s: float = _TIMEOUT_S, process: ConstraintProcess | None = None
) -> Verdict:
    """Parse an answer strictly and validate it. An invalid text or schema never raises an exception.

    schema     the parsed schema, or its JSON text
    timeout_s  CPU time limit
    process    a process to use, which stays open; if None, a new process is started, which takes 200 ms

    Raises LlmrunError if the process cannot be started.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        return Verdict("not validated", f"the schema is not JSON: {one_line(str(error))}")
    used = process or ConstraintProcess()
    limits = ProcessLimits(timeout_s, timeout_s * _WALL_PER_CPU_S, _MEMORY, _OUTPUT)
    try:
        kind, reason = used.value({"text": text, "schema": parsed}, "verdict", limits)
    except ProcessFailed as failure:
        return Verdict("not validated", str(failure))
    finally:
        if process is None:
            used.close()
    return Verdict(cast("VerdictKind", kind), one_line(reason))


def problem_with(value: object, schema: object) -> str | None:
    """Return the problem with a JSON value, or None if the value matches the schema or could not be validated."""
    verdict = validate(json.dumps(value), schema)
    return verdict.reason if verdict.kind == "invalid" else None
