"""An open engine, and what a benchmark wants to know of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.bench.asking import LocalAsker, RemoteAsker
from llmrun.types import ModelInfo

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """`facts` are plain values: they travel to another process."""

    asker: LocalAsker | RemoteAsker
    facts: dict[str, Any]
    close: Callable[[], None]


def open_target(
    *,
    path: str,
    endpoint: str,
    model: str,  # what to call it: names tell equal targets apart
    backend: str,
    threads: int | None,
    kv_type: str,
    gpu_layers: int | str,
    context_size: int | None,
    max_sequences: int,
    to_the_limit: bool,
    offline: bool,
    progress: Progress,
    note: Callable[[str], None],
) -> OpenTarget:
    """Open a file's model, or the endpoint's when one is named. Raises what `Engine.open` raises, and NetworkError."""
    if endpoint:
        from llmrun.remote.engine import RemoteEngine

        remote = RemoteEngine.open(
            endpoint, max_sequences=max_sequences, ignore_eos=to_the_limit, offline=offline, explain=note
        )
        return OpenTarget(RemoteAsker(remote), _facts(remote.info, 0.0), remote.close)
    from llmrun.backends.select import open_backend
    from llmrun.engine.engine import Engine

    compiled = False

    def told(what: str, fraction: float) -> None:
        nonlocal compiled
        compiled = compiled or what.startswith("compiling")
        progress(what, fraction)

    started = time.perf_counter()
    opened = open_backend(
        Path(path),
        backend=backend,
        context_size=context_size,
        max_sequences=max_sequences,
        threads=threads,
        kv_type=kv_type,
        gpu_layers=gpu_layers,
        progress=told,
    )
    engine = Engine(opened, load_s=time.perf_counter() - started)
    facts = _facts(engine.info, engine.load_s) | {"compiled": compiled} | _needs(opened, Path(path))
    return OpenTarget(LocalAsker(engine), facts, engine.close)


def _needs(backend: Backend, path: Path) -> dict[str, Any]:
    """What a token needs of the machine: by the plan where there is one, else by the file."""
    if backend.info.backend == "scripted":
        return {}
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.backends.model_needs import needs_of_file, needs_of_plan
    from llmrun.gguf.reader import open_gguf

    if isinstance(backend, CpuBackend):
        needs = needs_of_plan(backend.plan, kv_type=backend.info.kv_type)
    else:
        with open_gguf(path) as file:
            needs = needs_of_file(file, kv_type=backend.info.kv_type)
    windows = {str(tokens): n_bytes for tokens, n_bytes in needs.kv_read.windows}
    return {
        "weight_bytes": needs.weight_bytes,
        "kv_bytes_per_token": needs.kv_read.token,
        **({"kv_bytes_per_token_of_window": windows} if windows else {}),
        "prefill_products": needs.products,
    }


def _facts(info: ModelInfo, load_s: float) -> dict[str, Any]:
    return {
        "name": info.name,
        "architecture": info.architecture,
        "type": info.file_type,
        "parameters": info.parameters,
        "bytes": info.file_bytes,
        "backend": info.backend,
        "device": info.device,
        "threads": info.threads,
        "gpu_layers": info.gpu_layers,
        "kv_type": info.kv_type,
        "context_size": info.context_size,
        "max_sequences": info.max_sequences,
        "load_s": load_s,
    }
