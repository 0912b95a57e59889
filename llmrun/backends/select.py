"""From a path to an open backend. Every file passes the strict reader first, whichever backend runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

BACKENDS = ("auto", "cpu", "scripted")


def open_backend(
    path: Path,
    *,
    backend: str = "auto",
    context_size: int | None = None,
    max_sequences: int = 1,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Backend:
    """Open a model file on the backend named; "auto" is the CPU engine.

    context_size  tokens one sequence may hold; default: the model's own, at most base.DEFAULT_CONTEXT
    threads       default: one a physical core
    Raises ModelFileError, DoesNotFit, UsageError.
    """
    if backend == "scripted":
        from llmrun.backends.scripted import ScriptedBackend

        return ScriptedBackend.open(path, context_size=context_size, max_sequences=max_sequences)
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend: --backend: '{backend}', known are auto, cpu")
    from llmrun.backends.cpu import CpuBackend
    from llmrun.gguf.reader import open_gguf

    with open_gguf(path) as file:
        return CpuBackend(
            file,
            context_size=context_size,
            max_sequences=max_sequences,
            threads=threads,
            progress=progress,
        )
