"""The worker process of a benchmark, which opens one engine, describes the engine, and runs workloads on the engine.

A separate process per engine makes it possible to measure each engine's peak memory, to run the engines alternately,
and to keep the results of the other engines if one engine crashes.

Requests are called questions. For each question, the worker sends notes and progress reports, then an answer. The only
caller, pool.py, describes the protocol.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import is_stand_in
from llmrun.base.errors import Cancelled, LlmrunError, ModelFileError, UnsupportedModel, kernel_warnings_told
from llmrun.base.processes.frames import error_to_json, read_frame, write_frame
from llmrun.base.processes.worker import take_over_streams
from llmrun.base.types import ModelInfo
from llmrun.jobs.bench.measuring.asking import LocalAsker, RemoteAsker, Sample
from llmrun.jobs.bench.measuring.pool import CODEC, LONGEST
from llmrun.jobs.bench.measuring.workload import BenchTarget, Room, Workload
from llmrun.options.settings import SPECULATE_OFF

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, Progress


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """An open engine. `facts` contains only plain values, because `facts` is sent to another process."""

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
    from llmrun.backends.registry import open_backend
    from llmrun.engine.drafting.sources import open_sources, uses_draft_head
    from llmrun.engine.engine import Engine

    compiled = False

    def told(what: str, fraction: float) -> None:
        nonlocal compiled
        compiled = compiled or what.startswith("compiling")
        progress(what, fraction)

    started = time.perf_counter()
    speculate, draft = target.speculate != SPECULATE_OFF, Path(target.draft) if target.draft else None
    options = OpenOptions(
        backend=target.backend,
        context_size=room.context_size,
        max_sequences=room.max_sequences,
        threads=target.threads,
        kv_type=target.kv_type,
        adapters=target.adapters,
        gpu_layers=target.gpu_layers,
        progress=told,
        draft_head=uses_draft_head(speculate, draft),
    )
    opened = open_backend(Path(target.path), options)
    drafts = open_sources(speculate, draft, options, opened)
    engine = Engine(opened, load_s=time.perf_counter() - started, drafts=drafts)
    facts = _facts(engine.info, engine.load_s) | {"compiled": compiled} | _needs(opened, Path(target.path))
    return OpenTarget(LocalAsker(engine), facts, engine.close)


def _needs(backend: Backend, path: Path) -> dict[str, Any]:
    """Return the bytes read and the multiply-adds per token, or {} for models that our engine does not support."""
    if is_stand_in(backend.info.backend):
        return {}
    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.backends.fitting import needs_of_plan
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.model.archs.parts.architecture import plan_of_header

    if isinstance(backend, CpuBackend):
        needs = needs_of_plan(backend.plan, kv_type=backend.info.kv_type)
    else:
        try:
            with open_gguf(path) as file:
                needs = needs_of_plan(plan_of_header(file), kv_type=backend.info.kv_type, packed=False)
        except (UnsupportedModel, ModelFileError):
            return {}
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


Say = Callable[[Mapping[str, Any]], None]


class Worker:
    """Handles requests for one engine, and measures this machine."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._opened: Any = None  # An OpenTarget, whose module would import an engine if it were imported here.
        self._machine: Any = None

    def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle one request and return the answer. Raises LlmrunError if the request fails."""
        match question["do"]:
            case "open":
                return self._open(question)
            case "run":
                return {"sample": self._run(question, math.inf)}
            case "warm":
                return self._warm(question)
            case "limits":
                return self._limits(question["threads"], question["memory_bytes"])
            case "peak":
                from llmrun.base.machine.memory import peak_memory

                return {"peak": peak_memory()}
        raise LlmrunError(f"unknown question: {question['do']}")

    def _run(self, question: Mapping[str, Any], seconds: float) -> Sample:
        workload = msgspec.convert(question["workload"], Workload)
        sample: Sample = self._opened.asker.run(workload, question["seed"], seconds)
        return sample

    def _warm(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {"seconds": self._run(question, question["seconds"]).seconds}
        except Cancelled:
            return {"seconds": None}

    def close(self) -> None:
        """Close the engine, if it is open."""
        if self._opened is not None:
            self._opened.close()

    def _open(self, question: Mapping[str, Any]) -> Mapping[str, Any]:

        def progress(what: str, fraction: float) -> None:
            self._say({"progress": f"{what}  {fraction:.0%}"})

        def note(words: str) -> None:
            self._say({"note": words})

        target, room = msgspec.convert(question["target"], BenchTarget), msgspec.convert(question["room"], Room)
        self._opened = open_target(target, room, progress=progress, note=note)
        return {"facts": self._opened.facts}

    def _limits(self, n_threads: int, memory_bytes: int) -> Mapping[str, Any]:
        """Measure the limits of this machine. The buffer stays allocated after the first measurement."""
        from llmrun.backends.cpu.speeds.measured import MachineLimits

        if self._machine is None:
            self._machine = MachineLimits(n_threads, memory_bytes)
        return {"bandwidth": self._machine.read_bandwidth(), "multiply": self._machine.multiply_rate()}


def main() -> None:
    """Handle questions until the parent sends "close" or ends."""
    requests, answers = take_over_streams()
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:

        def say(body: Mapping[str, Any]) -> None:
            write_frame(sink, CODEC.encode(body))

        with kernel_warnings_told(lambda words: say({"note": words})), closing(Worker(say)) as worker:
            while (data := read_frame(source, LONGEST)) is not None:
                question = CODEC.decode(data)
                if question["do"] == "close":
                    break
                try:
                    say(worker.answer(question))
                except LlmrunError as error:
                    say(error_to_json(error))


if __name__ == "__main__":
    main()
