"""The open engines of a benchmark: all that take turns, as far as memory holds them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.backends.trained_context import beyond_training
from llmrun.bench.measuring.reporter import BenchReporter
from llmrun.bench.measuring.sweep import BenchTarget, Configuration, Room
from llmrun.bench.measuring.worker_process import WorkerProcess
from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.machine.free_memory import free_memory

Start = Callable[[BenchTarget, BenchReporter], WorkerProcess]

_MORE_THAN_THE_FILE = 1.2  # times: weights packed, and what the other parts take
_AND_SO_MUCH = 300 << 20  # bytes: interpreter, libraries, a short KV cache


@dataclass(slots=True)
class OpenedFacts:
    """What is known of a target once it was open: see target.open_target; `peak_memory` in bytes, 0: not known."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)  # seconds
    peak_memory: int = 0


class Pool:
    """Opens engines when their turn comes, and closes the one unused for longest when memory is short."""

    def __init__(self, configurations: Sequence[Configuration], reporter: BenchReporter, start: Start) -> None:
        self._reporter = reporter
        self._start_process = start
        self._rooms = rooms(configurations)
        self._open: dict[BenchTarget, WorkerProcess] = {}  # the one used last stands last
        self.opened: dict[BenchTarget, OpenedFacts] = {}

    def worker(self, target: BenchTarget) -> tuple[WorkerProcess, bool]:
        """The open engine of a target, and whether it was opened just now. Raises what opening it raises."""
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
        while self._open:  # alone it may fit
            self._close_oldest()
        return self._start(target), True

    def drop(self, target: BenchTarget) -> None:
        """Give up an engine that failed."""
        if target in self._open:
            self._open.pop(target).kill()

    def close(self) -> None:
        """Count what every engine took, and end it."""
        while self._open:
            self._close_oldest()

    def kill(self) -> None:
        """End all of them now."""
        while self._open:
            self._open.popitem()[1].kill()

    def _start(self, target: BenchTarget) -> WorkerProcess:
        worker, facts = self._started(target)
        if facts.get("compiled"):  # what it took to load then is nothing that would happen again
            worker.close()
            worker, facts = self._started(target)
        if target not in self.opened:
            self._tell_of_long_context(target, facts.get("train_context", 0))
        opened = self.opened.setdefault(target, OpenedFacts())
        opened.facts = facts
        opened.loads.append(facts["load_s"])
        self._open[target] = worker
        return worker

    def _tell_of_long_context(self, target: BenchTarget, trained: int) -> None:
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
            self._reporter.note(f"peak memory of {target.model} is not known: {error}")
        finally:
            worker.close()

    def _is_short_of_memory(self, target: BenchTarget) -> bool:
        free = free_memory()
        if free is None or target.endpoint:
            return False
        known = self.opened.get(target, OpenedFacts()).peak_memory
        try:
            file_bytes = Path(target.path).stat().st_size
        except OSError:
            return False  # opening it will say so
        return free < (known or file_bytes * _MORE_THAN_THE_FILE + _AND_SO_MUCH)


def rooms(configurations: Sequence[Configuration]) -> dict[BenchTarget, Room]:
    """What each target's engine must hold for all that it will be asked."""
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
