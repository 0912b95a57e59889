"""From a path to an open backend. Every file passes the strict reader first, whichever backend runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

BACKENDS = ("auto", "cpu", "llama")
ALL_LAYERS = "all"
AUTO = "auto"

Progress = Callable[[str, float], None]  # (what is going on, share done)


def open_backend(
    path: Path,
    *,
    backend: str = AUTO,
    context_size: int | None = None,
    max_sequences: int = 1,
    threads: int | None = None,
    gpu_layers: int | str = AUTO,
    progress: Progress | None = None,
    explain: Callable[[str], None] | None = None,
) -> Backend:
    """Open a model file on the backend named.

    backend       "auto": llama.cpp where it has a GPU to use, else our CPU engine where that runs the model, else
                  llama.cpp if it is installed
    context_size  tokens one sequence may hold; default: the model's own, at most base.DEFAULT_CONTEXT
    threads       default: one a physical core
    gpu_layers    for llama.cpp: a number, "all", or "auto": as many as fit
    explain       is told in a few words why "auto" chose what it did
    Raises ModelFileError, DoesNotFit, BackendCrashed, UsageError.
    """
    if backend == "scripted":
        from llmrun.backends.scripted import ScriptedBackend

        return ScriptedBackend.open(path, context_size=context_size, max_sequences=max_sequences)
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend: --backend: '{backend}', known are {', '.join(BACKENDS)}")
    from llmrun.backends.llama_probe import gpus, is_installed
    from llmrun.gguf.reader import open_gguf

    if backend == "llama" and not is_installed():
        raise UsageError("llama.cpp is not installed: --backend llama", hint=_how_to_install())
    with open_gguf(path) as file:

        def on_cpu() -> Backend:
            from llmrun.backends.cpu import CpuBackend

            return CpuBackend(
                file, context_size=context_size, max_sequences=max_sequences, threads=threads, progress=progress
            )

        def on_llama() -> Backend:
            from llmrun.backends.llama_cpp import LlamaBackend

            return LlamaBackend(
                file,
                context_size=context_size,
                max_sequences=max_sequences,
                threads=threads,
                gpu_layers=_number_of_layers(gpu_layers),
                progress=progress,
            )

        if backend != AUTO:
            return on_cpu() if backend == "cpu" else on_llama()
        found = gpus()
        if found.names and gpu_layers != 0:
            _tell(explain, f"auto took llama: it can use {' and '.join(found.names)}")
            return on_llama()
        try:
            opened = on_cpu()
        except UnsupportedModel as refusal:
            if not is_installed():
                raise _with_a_way_out(refusal) from refusal
            _tell(explain, f"auto took llama: {refusal}")
            return on_llama()
        _tell(explain, f"auto took cpu: {found.reason or 'no layer is to run on a GPU'}")
        return opened


def _number_of_layers(gpu_layers: int | str) -> int | None:
    """As LlamaBackend wants it: None is "as many as fit", -1 all."""
    if gpu_layers == AUTO:
        return None
    return -1 if gpu_layers == ALL_LAYERS else int(gpu_layers)


def _tell(explain: Callable[[str], None] | None, line: str) -> None:
    if explain is not None:
        explain(line)


def _with_a_way_out(refusal: UnsupportedModel) -> UnsupportedModel:
    """llama.cpp runs more architectures and weight types than our own engine."""
    return UnsupportedModel(str(refusal), hint=f"llama.cpp may run this model; {_how_to_install()}")


def _how_to_install() -> str:
    """The command, as it is to be typed. The requirement is the installed package's own, which is right whether or
    not llmrun itself came from an index."""
    from importlib.metadata import PackageNotFoundError, requires

    requirement = "llmrun[llama]"
    try:
        for line in requires("llmrun") or ():
            wanted, _, condition = line.partition(";")
            if condition.strip() in ("extra == 'llama'", 'extra == "llama"'):
                requirement = wanted.strip()
    except PackageNotFoundError:  # run from a folder that was never installed
        requirement = ".[llama]"
    return f'install it: {sys.executable} -m pip install "{requirement}"'
