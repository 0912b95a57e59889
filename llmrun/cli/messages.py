"""From an exception to what the user reads: one sentence, the next command to try, and the exit code."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, NamedTuple

from typer import TyperException

from llmrun.errors import DoesNotFit, LlmrunError, UsageError


class Message(NamedTuple):
    sentence: str
    hint: str
    exit_code: int


def message_for(error: Exception) -> Message:
    """The words for any exception that reaches the top."""
    if isinstance(error, LlmrunError):
        return Message(str(error), error.hint, error.exit_code)
    if isinstance(error, TyperException):
        return _usage(error)
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


def _usage(error: TyperException) -> Message:
    """Typer's own usage errors, in our form. Its classes are not public, so their attributes are asked for."""
    hint = f"see {_path(getattr(error, 'ctx', None))} --help"
    sentence = error.message.rstrip(".")
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if parameter is not None:
        name = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.human_readable_name
        sentence = f"{name}: {sentence or 'a value is missing'}"
    elif hasattr(error, "possibilities"):
        sentence = f"{option}: no such option"
    elif option is not None:
        sentence = f"{option}: " + ("a value is missing" if "requires" in sentence else "takes no value")
    else:
        sentence = sentence[:1].lower() + sentence[1:]
    if near := _nearest(str(option), getattr(error, "possibilities", None) or ()):
        hint = f"did you mean {' or '.join(near)}?"
    elif "Did you mean" in error.message:
        sentence, _, meant = sentence.partition(". Did you mean ")
        hint = f"did you mean {meant}"
    return Message(sentence, hint, UsageError.exit_code)


def _path(context: Any) -> str:
    """The command as it was typed, as far as the error tells: "llmrun bench"."""
    if context is None:
        return "llmrun"
    return f"{context.command_path} {context.invoked_subcommand or ''}".rstrip()


def _nearest(option: str, possibilities: Iterable[str]) -> list[str]:
    """Those that it begins or that differ by a slip: Typer's own are whatever shares a few letters, by the alphabet."""
    import difflib

    known = list(possibilities)
    begun = [name for name in known if name.startswith(option)]
    return begun or difflib.get_close_matches(option, known, n=2, cutoff=0.75)
