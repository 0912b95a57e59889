"""Every error llmrun raises on purpose, and the exit code each one ends the process with.

    LlmrunError                 1  failed
    ├── UsageError              2  a flag or an argument is wrong
    ├── ModelFileError          3  the file is broken, hostile, or of a kind we do not run
    │   ├── BadGGUF                a rule of the format is broken
    │   └── UnsupportedModel       well formed, but this build cannot run it
    ├── BackendCrashed          3  the backend died on this file
    ├── ModelNotFound           4  no such file, catalogue entry or repository
    ├── NetworkError            5  a server is unreachable, refuses, or wants authorization
    ├── IntegrityError          6  a file has another sha256 or size than was promised
    ├── DoesNotFit              7  not enough RAM, VRAM or disk
    │   └── KVFull                 the KV cache has no block left (the engine catches this one)
    ├── ContextExceeded         8  the prompt is longer than the context
    ├── TemplateRefused         9  the chat template is broken, too big or too slow
    └── Cancelled             130  Ctrl-C

and one warning, of Python's `warnings`: KernelWarning.

An error is one sentence in the form ``what: which file or key: number seen, limit``; `hint` is the next command to
try. `cli/messages.py` turns both into the lines the user reads.
"""

from __future__ import annotations


class LlmrunError(Exception):
    """Root of the tree. `hint` is what the user can do next, or an empty string."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(LlmrunError):
    exit_code = 2


class ModelFileError(LlmrunError):
    exit_code = 3


class BadGGUF(ModelFileError):
    """The file breaks a rule of the GGUF format."""


class UnsupportedModel(ModelFileError):
    """The file is well formed, but its architecture, tokenizer or a weight type is one this build cannot run."""


class BackendCrashed(LlmrunError):
    exit_code = 3


class ModelNotFound(LlmrunError):
    exit_code = 4


class NetworkError(LlmrunError):
    exit_code = 5


class IntegrityError(LlmrunError):
    exit_code = 6


class DoesNotFit(LlmrunError):
    """`most_weights`: bytes of weights that would fit, where the weights are what is too large."""

    exit_code = 7

    def __init__(self, message: str, *, hint: str = "", most_weights: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.most_weights = most_weights


class KVFull(DoesNotFit):
    """The KV cache has no room for a batch. Raised before anything has changed."""


class ContextExceeded(LlmrunError):
    exit_code = 8


class TemplateRefused(LlmrunError):
    exit_code = 9


class Cancelled(LlmrunError):
    """A forward pass was stopped by `Backend.cancel()`; the rows of that batch are not in the KV cache."""

    exit_code = 130


class KernelWarning(UserWarning):
    """Compiled kernels were damaged, or cannot be kept, or an instruction level does not work here. It costs time, and
    nothing else."""
