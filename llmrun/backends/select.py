"""From a path to an open backend. Every file passes the strict reader first, whichever backend runs it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.backends.llama import probe
from llmrun.errors import UnsupportedModel, UsageError
from llmrun.settings import BACKENDS, KV_TYPES

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.gguf.reader import GGUFFile

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
    kv_type: str = "f16",
    gpu_layers: int | str = AUTO,
    progress: Progress | None = None,
    explain: Callable[[str], None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Backend:
    """Open a model file on the backend named.

    backend       "auto": llama.cpp where it can run layers of the model on a GPU, else our CPU engine where that runs
                  the model, else llama.cpp if it is installed
    context_size  tokens one sequence may hold; default: what fits (context_size.py)
    threads       default: one a physical core
    kv_type       of the numbers in the KV cache: "f16" or "q8_0"
    gpu_layers    for llama.cpp: a number, "all", or "auto": as many as fit
    explain       is told in a few words what "auto" chose, and why
    meanwhile     may be called while weights are read: what is to be done anyway then costs no time
    Raises ModelFileError, DoesNotFit, BackendCrashed, UsageError.
    """
    if backend == "scripted":
        from llmrun.backends.scripted.backend import ScriptedBackend

        return ScriptedBackend.open(path, context_size=context_size, max_sequences=max_sequences)
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend: --backend: '{backend}', known are {', '.join(BACKENDS)}")
    if kv_type not in KV_TYPES:
        raise UsageError(f"unknown type of the KV cache: --kv-type: '{kv_type}', known are {', '.join(KV_TYPES)}")
    if backend == "llama" and not probe.is_installed():
        raise UsageError("llama.cpp is not installed: --backend llama", hint=_how_to_install())
    from llmrun.gguf.reader import open_gguf

    n_layers = _number_of_layers(gpu_layers)
    with open_gguf(path) as file:
        opener = _Opener(file, context_size, max_sequences, threads, kv_type, progress, meanwhile)
        if backend == "cpu":
            return opener.on_cpu()
        if backend == "llama":
            return _opened_on_llama(opener, n_layers, explain or _say_nothing)
        return _opened_on_the_best(opener, n_layers, explain or _say_nothing)


@dataclass(frozen=True, slots=True)
class _Opener:
    """An open file, and how to open its model on either backend."""

    file: GGUFFile
    context_size: int | None
    max_sequences: int
    threads: int | None
    kv_type: str
    progress: Progress | None
    meanwhile: Callable[[], None]

    def on_cpu(self) -> Backend:
        from llmrun.backends.cpu.backend import CpuBackend

        return CpuBackend(
            self.file,
            context_size=self.context_size,
            max_sequences=self.max_sequences,
            threads=self.threads,
            kv_type=self.kv_type,
            progress=self.progress,
            meanwhile=self.meanwhile,
        )

    def on_llama(self, n_layers: int | None) -> Backend:
        from llmrun.backends.llama.backend import LlamaBackend

        return LlamaBackend(
            self.file,
            context_size=self.context_size,
            max_sequences=self.max_sequences,
            threads=self.threads,
            kv_type=self.kv_type,
            gpu_layers=n_layers,
            progress=self.progress,
        )


def _opened_on_llama(opener: _Opener, n_layers: int | None, explain: Callable[[str], None]) -> Backend:
    """A number of layers is passed on as it is; as many as fit may be none."""
    if n_layers is not None:
        return opener.on_llama(n_layers)
    from llmrun.backends.llama.gpu_layers import NoRoomOnGpu

    found = probe.gpus(opener.progress)
    reason = found.reason
    if found.names:
        try:
            return opener.on_llama(None)
        except NoRoomOnGpu as full:
            reason = str(full)
    explain(f"no layer on a GPU: {reason}")
    return opener.on_llama(0)


def _opened_on_the_best(opener: _Opener, n_layers: int | None, explain: Callable[[str], None]) -> Backend:
    from llmrun.backends.llama.gpu_layers import NoRoomOnGpu

    reason = "no layer is to run on a GPU"
    if n_layers != 0:
        found = probe.gpus(opener.progress)
        reason = found.reason
        if found.names:
            try:
                opened = opener.on_llama(n_layers)
            except (NoRoomOnGpu, UnsupportedModel) as refusal:
                reason = str(refusal)
            else:
                explain(f"auto took llama: it can use {' and '.join(found.names)}")
                return opened
    try:
        opened = opener.on_cpu()
    except UnsupportedModel as refusal:
        if not probe.is_installed():
            raise _with_a_way_out(refusal) from refusal
        explain(f"auto took llama: {refusal}")
        return opener.on_llama(0)
    explain(f"auto took cpu: {reason}")
    return opened


def _number_of_layers(gpu_layers: int | str) -> int | None:
    """As LlamaBackend wants it: None is "as many as fit", -1 all."""
    if gpu_layers == AUTO:
        return None
    return -1 if gpu_layers == ALL_LAYERS else int(gpu_layers)


def _say_nothing(words: str) -> None:
    """Nobody asked why."""


def _with_a_way_out(refusal: UnsupportedModel) -> UnsupportedModel:
    """llama.cpp runs more architectures and weight types than our own engine."""
    return UnsupportedModel(str(refusal), hint=f"llama.cpp may run this model; {_how_to_install()}")


def _how_to_install() -> str:
    return f"install it: {install_command()}"


def install_command() -> str:
    """What installs llama.cpp, as it is to be typed."""
    return f'{shlex.quote(sys.executable)} -m pip install "{llama_requirement()}"'


def llama_requirement() -> str:
    """What pip is to install for llama.cpp. It is the installed package's own requirement, which is right whether or
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
    return requirement
