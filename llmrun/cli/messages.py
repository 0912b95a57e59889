"""From an exception to what the user reads: one sentence, the next command to try, and the exit code."""

from __future__ import annotations

import errno
from typing import NamedTuple

from typer import TyperException

from llmrun.cli.arguments.usage import usage_error
from llmrun.errors import DoesNotFit, LlmrunError


class Message(NamedTuple):
    sentence: str
    hint: str
    exit_code: int


def message_for(error: Exception) -> Message:
    """The words for any exception that reaches the top."""
    if isinstance(error, TyperException):  # no such command: it tells where; the rest is told in usage.py
        error = usage_error(error, getattr(error, "ctx", None))
    if isinstance(error, LlmrunError):
        return Message(str(error), error.hint, error.exit_code)
    if isinstance(error, MemoryError):
        return Message(
            "memory: this machine has none left for the request",
            "try a smaller model, or a smaller --ctx-size",
            DoesNotFit.exit_code,
        )
    if isinstance(error, OSError) and error.strerror:
        return _system(error)
    return Message(f"internal: {type(error).__name__}: {error}", "run again with --debug, and report what it shows", 1)


def _system(error: OSError) -> Message:
    where = f"{error.filename}: " if error.filename is not None else ""
    hint = {
        errno.ENOSPC: "make room on the disk, or point LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to another one",
        errno.EACCES: "set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to folders you may write to",
        errno.EROFS: "set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to folders you may write to",
    }.get(error.errno or 0, "")
    code = DoesNotFit.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else LlmrunError.exit_code
    return Message(f"system: {where}{error.strerror}", hint, code)
