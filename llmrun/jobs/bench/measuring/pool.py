"""Keeps a benchmark's engines open between their turns, as many at a time as fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.backends.trained_context import beyond_training
from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.base.machine.free_memory import free_memory
from llmrun.jobs.bench.measuring.reporter import BenchReporter
from llmrun.jobs.bench.measuring.sweep import BenchTarget, Configuration, Room
from llmrun.jobs.bench.measuring.worker_process import WorkerProcess

Start = Callable[[BenchTarget, BenchReporter], WorkerProcess]

_FILE_FACTOR = 1.2  # The estimated memory of an open model, including packed weights, relative to its file size.
_OVERHEAD_BYTES = 300 << 20  # Additional memory per engine for the interpreter, libraries and a short KV cache.


@dataclass(slots=True)
class OpenedFacts:
    """Metadata about a target, collected when its engine was opened.

    facts        the metadata from target.open_target
    loads        the load times in seconds
    peak_memory  bytes; 0 if unknown
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    peak_memory: int = 0


class Pool:
    """Opens engines on demand, and closes the least recently used one when memory is short."""

    def __init__(self, configurations: Sequence[Configuration], reporter: BenchReporter, start: Start) -> None:
        self._reporter = reporter
        self._start_process = start
        self._rooms = rooms(configurations)
        self._open: dict[BenchTarget, WorkerProcess] = {}  # most recently used last
        self.opened: dict[BenchTarget, OpenedFacts] = {}

    def worker(self, target: BenchTarget) -> tuple[WorkerProcess, bool]:
        """Return a target's worker, and whether this call opened it. Raises the errors of `WorkerProcess.open`."""
        if target in self._open:
            self._open[target] = self._open.pop(target)
            return self._open[target], False
        while self._open and self._is_short_of_memory(target):
            self._close_oldest()
        try:
            return self._start(target), True
        except DoesNotFit:
            if not self._open:
                raise
        while self._open:  # The engine may fit once all others are closed.
            self._close_oldest()
        return self._start(target), True

    def drop(self, target: BenchTarget) -> None:
        """Kill a target's engine after a failure, if the engine is open."""
        if target in self._open:
            self._open.pop(target).kill()

    def close(self) -> None:
        """Record the peak memory of every open engine and close it."""
        while self._open:
            self._close_oldest()

    def kill(self) -> None:
        """Kill all open engines immediately."""
        while self._open:
            self._open.popitem()[1].kill()

    def _start(self, target: BenchTarget) -> WorkerProcess:
        worker, facts = self._started(target)
        if facts.get("compiled"):  # This load time includes the one-time kernel compilation, so load again.
            worker.close()
            worker, facts = self._started(target)
        if target not in self.opened:
            self._warn_about_long_context(target, facts.get("train_context", 0))
        opened = self.opened.setdefault(target, OpenedFacts())
        opened.facts = facts
        opened.loads.append(facts["load_s"])
        self._open[target] = worker
        return worker

    def _warn_about_long_context(self, target: BenchTarget, trained: int) -> None:
        if words := beyond_training(target.model, self._rooms[target].context_size or 0, trained):
            self._reporter.note(words)

    def _started(self, target: BenchTarget) -> tuple[WorkerProcess, dict[str, Any]]:
        worker = self._start_process(target, self._reporter)
        try:
            return worker, worker.open(target, self._rooms[target])
        except BaseException:
            worker.kill()
            raise

    def _close_oldest(self) -> None:
        target = next(iter(self._open))
        worker = self._open.pop(target)
        try:
            self.opened[target].peak_memory = max(self.opened[target].peak_memory, worker.peak_memory())
        except LlmrunError as error:
            self._reporter.note(f"peak memory of {target.model} is unknown: {error}")
        finally:
            worker.close()

    def _is_short_of_memory(self, target: BenchTarget) -> bool:
        free = free_memory()
        if free is None or target.endpoint:
            return False
        known = self.opened.get(target, OpenedFacts()).peak_memory
        try:
            file_bytes = sum(Path(path).stat().st_size for path in (target.path, target.draft) if path)
        except OSError:
            return False  # Opening the file will report the error.
        return free < (known or file_bytes * _FILE_FACTOR + _OVERHEAD_BYTES)


def rooms(configurations: Sequence[Configuration]) -> dict[BenchTarget, Room]:
    """Return the context size and the number of sequences that each target's workloads require."""
    found: dict[BenchTarget, Room] = {}
    for configuration in configurations:
        workload = configuration.workload
        before = found.get(configuration.target, Room(0, 1, False))
        sizes = (before.context_size, workload.context_size)
        found[configuration.target] = Room(
            None if None in sizes else max(size for size in sizes if size is not None),
            max(before.max_sequences, workload.facts.concurrency),
            workload.facts.kind == "synthetic",
        )
    return found
