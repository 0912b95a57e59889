"""Keeps a benchmark's engines open between their turns, as many at a time as fit into memory.

Each engine is in a worker process (see worker.py). The parent exchanges messages with the worker, and reports the cause
if the worker dies:

    {"do": "open", "target": {...}, "room": {...}}  -> {"facts": {...}}
    {"do": "run", "workload": {...}, "seed": 7}     -> {"sample": {...}}
    {"do": "warm", "workload", "seed", "seconds": 6} -> {"seconds": 1.5}, or None if the run was cancelled
    {"do": "limits", "threads": 2, "memory_bytes"}  -> {"bandwidth": 4e10, "multiply": 2e12}
    {"do": "peak"}                                  -> {"peak": 240000000}
    {"do": "close"}                                 -> the worker ends

{"progress": text} and {"note": text} may precede an answer. An answer may be {"error": class name, ...}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from llmrun.backends.base import beyond_training
from llmrun.base.errors import BackendCrashed, DoesNotFit, LlmrunError
from llmrun.base.machine.memory import free_memory
from llmrun.base.processes import commands
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import BadMessage, Codec, FrameTooLong, error_from_json
from llmrun.jobs.bench.measuring.asking import Sample
from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration, Room, Workload


class BenchReporter(Protocol):
    """Shows the progress and notes of a benchmark.

    note      show a message that stays visible
    progress  replace the current progress; `share` is the completed share of the work, 0 to 1
    watch     call `tell` repeatedly and show the progress that it returns, until the next `progress` or `watch`
    """

    def progress(self, words: str, share: float | None = None) -> None: ...

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None: ...

    def note(self, words: str) -> None: ...


_PATIENCE_S = 10.0
LONGEST = 1 << 32  # bytes; a longer message is invalid
CODEC: Codec[Any] = Codec(Any)


class WorkerProcess:
    """One worker. Not thread-safe."""

    def __init__(self, reporter: BenchReporter, command: Sequence[str] | None = None) -> None:
        """Start the worker, or `command`, which must use the same protocol. Raises LlmrunError if starting fails."""
        self._reporter = reporter
        self._is_closed = False
        # In its own process group, the worker does not receive the terminal's Ctrl-C.
        self._child = Child(
            command or commands.command("jobs.bench.measuring.worker"),
            purpose="a worker process",
            group=commands.in_own_group,
        )

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._child.pid

    def open(self, target: BenchTarget, room: Room) -> dict[str, Any]:
        """Open a target and return its metadata. Raises the error that the worker reports."""
        answer = self._ask("opening the model", do="open", target=target, room=room)
        facts: dict[str, Any] = answer["facts"]
        return facts

    def run(self, workload: Workload, seed: int) -> Sample:
        """Run a workload once. Raises BackendCrashed, NetworkError and the error of a failed request."""
        answer = self._ask("running a workload", do="run", workload=workload, seed=seed)
        return msgspec.convert(answer["sample"], Sample)

    def warm(self, workload: Workload, seed: int, seconds: float) -> float | None:
        """Run a workload once and return its time in seconds, or None if the run was cancelled after `seconds`.

        The current prompt chunk is finished before the run is cancelled. Raises the errors of `run`.
        """
        answer = self._ask("warming up", do="warm", workload=workload, seed=seed, seconds=seconds)
        taken: float | None = answer["seconds"]
        return taken

    def limits(self, threads: int, memory_bytes: int) -> tuple[float, float]:
        """Measure the machine's limits. Returns (bytes read from memory, int8 multiply-adds) per second."""
        answer = self._ask("measuring the machine", do="limits", threads=threads, memory_bytes=memory_bytes)
        return answer["bandwidth"], answer["multiply"]

    def peak_memory(self) -> int:
        """Return the peak memory of the worker in bytes."""
        return int(self._ask("measuring its peak memory", do="peak")["peak"])

    def close(self) -> None:
        """End the process after giving the process time to clean up. This method is idempotent."""
        if not self._is_closed:
            self._child.send(CODEC.encode({"do": "close"}))
            self._child.wait(_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process immediately. This method is idempotent."""
        self._is_closed = True
        self._child.end(0)

    def _ask(self, doing: str, **question: Any) -> dict[str, Any]:
        if self._is_closed:
            raise LlmrunError("the worker process of the benchmark is closed")
        self._child.send(CODEC.encode(question))
        try:
            while (data := self._child.receive(LONGEST)) is not None:
                answer: dict[str, Any] = CODEC.decode(data)
                if "progress" in answer:
                    self._reporter.progress(answer["progress"])
                elif "note" in answer:
                    self._reporter.note(answer["note"])
                elif "error" in answer:
                    raise error_from_json(answer)
                else:
                    return answer
        except (BadMessage, FrameTooLong) as error:
            raise BackendCrashed(f"a worker process of the benchmark sent an invalid message: {error}") from error
        self._child.end(_PATIENCE_S)
        raise BackendCrashed(f"a worker process of the benchmark died while {doing}: {self._child.ending()}")


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
    """Opens engines on demand, and closes the least recently used engine when memory is short."""

    def __init__(self, configurations: Sequence[Configuration], reporter: BenchReporter, start: Start) -> None:
        self._reporter = reporter
        self._start_process = start
        self._rooms = rooms(configurations)
        self._open: dict[BenchTarget, WorkerProcess] = {}  # sorted by time of use, the most recent last
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
        while self._open:  # The engine may fit once all other engines are closed.
            self._close_oldest()
        return self._start(target), True

    def drop(self, target: BenchTarget) -> None:
        """Kill a target's engine after a failure, if the engine is open."""
        if target in self._open:
            self._open.pop(target).kill()

    def close(self) -> None:
        """Record the peak memory of every open engine, and close the engines."""
        while self._open:
            self._close_oldest()

    def kill(self) -> None:
        """Kill all open engines immediately."""
        while self._open:
            self._open.popitem()[1].kill()

    def _start(self, target: BenchTarget) -> WorkerProcess:
        worker, facts = self._started(target)
        if facts.get("compiled"):  # The load time includes the one-time kernel compilation, so load again.
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
