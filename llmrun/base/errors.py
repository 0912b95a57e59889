"""All errors that llmrun raises on purpose, with their exit codes.

    LlmrunError                 1  any other failure
    ├── InvalidAnswer           1  the answer does not have the requested format
    ├── UsageError              2  an invalid flag or argument
    ├── ModelFileError          3  the file is broken, malicious or not supported
    │   ├── BadGGUF                the file violates the GGUF format
    │   └── UnsupportedModel       the file is valid, but this build cannot run it
    ├── BackendCrashed          3  the backend crashed while running this file
    ├── ModelNotFound           4  no such file, catalogue entry or repository
    ├── NetworkError            5  the server is unreachable, refuses the connection or denies access
    ├── IntegrityError          6  the data does not match its checksum or size
    ├── DoesNotFit              7  not enough RAM, VRAM or disk space
    │   └── KVFull                 the KV cache has no free block (the engine catches this error)
    ├── ContextExceeded         8  the prompt is longer than the context
    ├── TemplateRefused         9  the chat template is broken, too big or too slow
    ├── Overloaded              1  in `serve`, status 429: the queue is full, or the wait would be too long
    ├── Unavailable             1  in `serve`, status 503: the model is loading, restarting or shutting down
    └── Cancelled             130  Ctrl-C

Messages have the form ``what happened: file or key: actual value, limit``. The `hint` advises the user on what to do
next. `cli/messages.py` formats messages and hints for the terminal.

KernelWarning and BrokenEntry are the only warnings that llmrun issues through Python's `warnings`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self, TextIO


class LlmrunError(Exception):
    """The base class of llmrun's errors. `hint` advises the user on what to do next, and may be empty."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InvalidAnswer(LlmrunError):
    """The answer does not have the requested format, because the answer was cut off or violates the format."""


class UsageError(LlmrunError):
    exit_code = 2


class ModelFileError(LlmrunError):
    exit_code = 3


class BadGGUF(ModelFileError):
    """The file violates the GGUF format."""


class UnsupportedModel(ModelFileError):
    """The file is valid, but this build cannot run its architecture, tokenizer or weight type."""


class BackendCrashed(LlmrunError):
    exit_code = 3


class ModelNotFound(LlmrunError):
    exit_code = 4


class NetworkError(LlmrunError):
    exit_code = 5


class IntegrityError(LlmrunError):
    exit_code = 6


class DoesNotFit(LlmrunError):
    """The available memory or disk space is not sufficient.

    `most_weights` is the largest size of weights that would fit, in bytes, or None if the weights are not the cause.
    """

    exit_code = 7

    def __init__(self, message: str, *, hint: str = "", most_weights: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.most_weights = most_weights


class KVFull(DoesNotFit):
    """The KV cache has no room for a batch. The cache has not been changed."""


class ContextExceeded(LlmrunError):
    exit_code = 8

    @classmethod
    def by_prompt(cls, tokens: int, limit: int, *, hint: str) -> Self:
        """Return the error for a prompt that leaves no room for an answer. `limit` is the context size in tokens."""
        return cls(
            f"prompt does not fit in the context: {tokens:,} tokens plus one for the answer exceed the limit of "
            f"{limit:,}",
            hint=hint,
        )


class TemplateRefused(LlmrunError):
    exit_code = 9


class Overloaded(LlmrunError):
    """The queue is full, or the wait would be too long. `retry_after` is the predicted wait in seconds."""

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class Unavailable(LlmrunError):
    """The model is loading, restarting or shutting down, as described by `state` in one word."""

    def __init__(self, message: str, *, hint: str = "", state: str = "loading", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.state = state
        self.retry_after = retry_after


class Cancelled(LlmrunError):
    """`Backend.cancel()` stopped a forward pass. The rows of the stopped pass are not in the KV cache."""

    exit_code = 130


class KernelWarning(UserWarning):
    """Kernels were damaged or could not be cached, or an instruction set failed its test on this machine.

    After this warning, llmrun recompiles the kernels or falls back to slower kernels, which give the same results.
    """


class BrokenEntry(UserWarning):
    """Warns that an invalid entry of the user's models.toml is ignored. The other entries work."""


def warn_of_broken_entry(error: UsageError) -> None:
    """Issue a BrokenEntry warning for an invalid entry, which is then left out."""
    warnings.warn(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""), BrokenEntry, stacklevel=2)


@contextmanager
def kernel_warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """In the `with` block, call `tell` once per distinct KernelWarning message. Other warnings are shown as usual."""
    with warnings_told(tell, KernelWarning):
        yield


@contextmanager
def warnings_told(tell: Callable[[str], None], kind: type[Warning]) -> Iterator[None]:
    """In the `with` block, call `tell` once per distinct message of this kind. Other warnings are shown as usual."""
    told_before: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", kind)
        show = warnings.showwarning

        def told(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, kind):
                show(message, category, filename, lineno, file, line)
            elif str(message) not in told_before:
                told_before.add(str(message))
                tell(str(message))

        warnings.showwarning = told
        yield


def shown(text: str | bytes, limit: int = 80) -> str:
    r"""Escape untrusted text so that it is safe to print on one terminal line.

    Non-printable characters (control characters, bidirectional marks, lone surrogates) are written as escapes such as
    \x1b or \u202e, and bytes that are not UTF-8 as escapes such as \xff. The middle of long text is replaced with "…".
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode(errors="backslashreplace") + ("…" if len(text) > 4 * limit else "")
    if len(text) > limit:
        text = text[: limit * 2 // 3] + "…" + text[-(limit // 3) :]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is most similar to a misspelled name, or with all names."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"
