"""The isolated process for constrained output, which validates answers and compiles every grammar first."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from llmrun.engine.isolation.frames import decoded, encoded
from llmrun.engine.isolation.process import IsolatedProcess, ProcessFailed, ProcessLimits
from llmrun.formats.gguf.problems import shown

_MEMORY_PER_BYTE = 60  # bytes per byte of a request; nested JSON of short values takes 50 bytes per byte of text
_REASON_LENGTH = 300
_TOO_DEEP = "it is nested too deeply"
_INVALID_ANSWER = "its process sent an invalid answer"
_ABORTED = (-6, 0xC0000409)  # SIGABRT, and STATUS_STACK_BUFFER_OVERRUN, which Windows uses for `abort`
_STACK_OVERFLOWS = (-signal.SIGSEGV, -10, 0xC00000FD)  # SIGBUS on macOS, and STATUS_STACK_OVERFLOW on Windows


class ConstraintProcess(IsolatedProcess):
    """The process that handles the schemas and answers of one model. Not thread-safe.

    It starts with `start` or on first use, which takes 60 ms. The first request takes another 40 to 90 ms for imports.
    """

    def __init__(self) -> None:
        super().__init__("engine.constraint.validation_worker", "structured output")

    def request(self, content: dict[str, Any], wanted: str, limits: ProcessLimits) -> Any:
        """Send a request and return the answer's value. Raises ProcessFailed unless its kind is `wanted`."""
        try:
            request = encoded(content)
        except RecursionError:
            raise ProcessFailed(_TOO_DEEP) from None
        memory = max(limits.memory, self._memory, len(request) * _MEMORY_PER_BYTE)
        limits = replace(limits, memory=memory)
        try:
            kind, value = decoded(self._answer(request, limits))
        except (ValueError, TypeError, RecursionError):
            kind = value = None
        except ProcessFailed as failure:
            raise _explained(failure, limits) from None
        if kind == wanted:
            return value
        self.close()  # after running out of memory, it may be in a bad state
        raise ProcessFailed({"memory": limits.out_of_memory, "depth": _TOO_DEEP}.get(str(value), _INVALID_ANSWER))


def one_line(words: str) -> str:
    """Return at most 300 characters on one line that is safe to print. Escapes count as well."""
    return shown(shown(" ".join(words.split()), _REASON_LENGTH), _REASON_LENGTH)


def _explained(failure: ProcessFailed, limits: ProcessLimits) -> ProcessFailed:
    """Say what an exit status means: Rust aborts if memory is refused, and a stack overflow is a fault."""
    if failure.status in _ABORTED:
        return ProcessFailed(limits.out_of_memory)
    return ProcessFailed(_TOO_DEEP) if failure.status in _STACK_OVERFLOWS else failure
