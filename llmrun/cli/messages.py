"""Converts exceptions to messages, each with a sentence, a hint about what to try, and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from typer import TyperException

from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.cli.arguments.usage import usage_error

# Matches the loader's error for a shared library that cannot be mapped into memory, which has no errno.
_UNMAPPED = r"(?P<library>.+?): (failed to map segment from shared object|cannot map zero-fill pages)"


class Message(NamedTuple):
    sentence: str
    hint: str
    exit_code: int


def message_for(error: Exception) -> Message:
    """Return the message for any exception that reaches `main`."""
    if isinstance(error, TyperException):  # always "no such command", because commands convert all other errors
        error = usage_error(error, getattr(error, "ctx", None))
    if isinstance(error, LlmrunError):
        return Message(str(error), error.hint, error.exit_code)
    if any(map(_is_out_of_memory, _chain(error))):
        return _out_of_memory()
    if isinstance(error, OSError) and error.strerror:
        return _system(error)
    sentence = f"internal error: {type(error).__name__}: {error}"
    return Message(sentence, "run the command again with --debug and report the traceback", 1)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, then its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, OSError | ImportError) or not (unmapped := re.match(_UNMAPPED, str(error))):
        return False
    if sys.platform != "linux":
        return True
    # The loader reports the same error if the file system is mounted with noexec.
    try:
        return not os.statvfs(unmapped["library"]).f_flag & os.ST_NOEXEC
    except OSError:  # if the library is a dependency of another library, the message does not contain its folder
        return True


def _out_of_memory() -> Message:
    from llmrun.base.amounts import format_bytes
    from llmrun.base.machine.memory import address_space_limit

    limit = address_space_limit()
    if limit is None:
        sentence = "not enough memory for this request"
        hint = "try a smaller model or a smaller --ctx-size"
    else:
        sentence = f"not enough memory for this request: the process is limited to {format_bytes(limit)}"
        hint = "raise the limit with ulimit -v, or try a smaller model or a smaller --ctx-size"
    return Message(sentence, hint, DoesNotFit.exit_code)


def _system(error: OSError) -> Message:
    where = f"{error.filename}: " if error.filename is not None else ""
    hint = {
        errno.ENOSPC: "free some disk space, or set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to folders on another disk",
        errno.EACCES: "set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to writable folders",
        errno.EROFS: "set LLMRUN_CACHE_DIR and LLMRUN_DATA_DIR to writable folders",
    }.get(error.errno or 0, "")
    code = DoesNotFit.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else LlmrunError.exit_code
    return Message(f"system error: {where}{error.strerror}", hint, code)
