"""Opens a target's engine and collects the metadata that a benchmark reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import is_stand_in
from llmrun.base.types import ModelInfo
from llmrun.jobs.bench.measuring.asking import LocalAsker, RemoteAsker
from llmrun.options.settings import SPECULATE_OFF

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, Progress
    from llmrun.jobs.bench.measuring.sweep import BenchTarget, Room


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """An open engine. `facts` contains only plain values, because it is sent to another process."""

    asker: LocalAsker | RemoteAsker
    facts: dict[str, Any]
    close: Callable[[], None]


def open_target(target: BenchTarget, room: Room, *, progress: Progress, note: Callable[[str], None]) -> OpenTarget:
    """Open a model file, or connect to an endpoint. Raises the errors of `Engine.open`, and NetworkError."""
    if target.endpoint:
        from llmrun.engine.remote.engine import RemoteEngine

        remote = RemoteEngine.open(
            target.endpoint,
            max_sequences=room.max_sequences,
            ignore_eos=room.to_the_limit,
            offline=target.offline,
            explain=note,
        )
        return OpenTarget(RemoteAsker(remote), _facts(remote.info, 0.0), remote.close)
    from llmrun.backends.select import open_backend
    from llmrun.engine.drafting.sources import open_sources, uses_draft_head
    from llmrun.engine.engine import Engine

    compiled = False

    def told(what: str, fraction: float) -> None:
        nonlocal compiled
        compiled = compiled or what.startswith("compiling")
        progress(what, fraction)

    started = time.perf_counter()
    speculate, draft = target.speculate != SPECULATE_OFF, Path(target.draft) if target.draft else None
    options = replace(_options(target, room, told), draft_head=uses_draft_head(speculate, draft))
    opened = open_backend(Path(target.path), options)
    drafts = open_sources(speculate, draft, options, opened)
    engine = Engine(opened, load_s=time.perf_counter() - started, drafts=drafts)
    facts = _facts(engine.info, engine.load_s) | {"compiled": compiled} | _needs(opened, Path(target.path))
    return OpenTarget(LocalAsker(engine), facts, engine.close)


def _options(target: BenchTarget, room: Room, progress: Progress) -> OpenOptions:
    return OpenOptions(
        backend=target.backend,
        context_size=room.context_size,
        max_sequences=room.max_sequences,
        threads=target.threads,
        kv_type=target.kv_type,
        adapters=target.adapters,
        gpu_layers=target.gpu_layers,
        progress=progress,
    )


def _needs(backend: Backend, path: Path) -> dict[str, Any]:
    """Return the bytes read and the multiply-adds per token, from the plan if there is one, else from the file."""
    if is_stand_in(backend.info.backend):
        return {}
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.backends.model_needs import needs_of_file, needs_of_plan
    from llmrun.formats.gguf.reader import open_gguf

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
        **({"state_bytes_per_token": needs.kv_read.states} if needs.kv_read.states else {}),
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
        "train_context": info.train_context,
        "max_sequences": info.max_sequences,
        "batch_invariant": info.batch_invariant,
        "load_s": load_s,
        **({"adapters": {adapter.name: adapter.scale for adapter in info.adapters}} if info.adapters else {}),
    }
