"""The parent's side of a worker process. It starts the worker, sends requests and reports how the worker died.

    {"do": "open", "target": {...}, "room": {...}}  -> {"facts": {...}}
    {"do": "run", "workload": {...}, "seed": 7}     -> {"sample": {...}}
    {"do": "warm", "workload", "seed", "seconds": 6} -> {"seconds": 1.5}, or null if it was cancelled
    {"do": "limits", "threads": 2, "memory_bytes"}  -> {"bandwidth": 4e10, "multiply": 2e12}
    {"do": "peak"}                                  -> {"peak": 240000000}

Lines with {"progress": text} or {"note": text} may precede an answer. An answer may be {"error": class name, ...}.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from llmrun.base import child_processes
from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.engine.child.codec import error_from_json
from llmrun.formats.gguf.problems import shown
from llmrun.jobs.bench.measuring.reporter import BenchReporter
from llmrun.jobs.bench.measuring.sample import Sample
from llmrun.jobs.bench.measuring.sweep import BenchTarget, Room
from llmrun.jobs.bench.measuring.workload import Workload

_PATIENCE_S = 10.0
_LAST_WORDS = 400  # The last line of the worker's stderr is quoted up to this length.


class WorkerProcess:
    """One worker. Not thread-safe."""

    def __init__(self, reporter: BenchReporter, command: Sequence[str] | None = None) -> None:
        """Start the worker, or `command`, which must speak the same protocol. Raises LlmrunError if it cannot start."""
        self._reporter = reporter
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        try:
            self._process = _started(
                command or child_processes.command("jobs.bench.measuring.worker"), self._stderr.fileno()
            )
        except OSError as error:
            self._stderr.close()
            raise LlmrunError(f"cannot start a worker process: {sys.executable}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def open(self, target: BenchTarget, room: Room) -> dict[str, Any]:
        """Open a target and return its metadata. Raises the error that the worker reports."""
        answer = self._ask("opening the model", do="open", target=asdict(target), room=asdict(room))
        facts: dict[str, Any] = answer["facts"]
        return facts

    def run(self, workload: Workload, seed: int) -> Sample:
        """Run a workload once. Raises BackendCrashed, NetworkError and the error of a failed request."""
        return Sample.from_json(
            self._ask("running a workload", do="run", workload=workload.to_json(), seed=seed)["sample"]
        )

    def warm(self, workload: Workload, seed: int, seconds: float) -> float | None:
        """Run a workload once and return its time in seconds, or None if it was cancelled after `seconds`.

        The current prompt chunk is finished before the run is cancelled. Raises the errors of `run`.
        """
        question = {"workload": workload.to_json(), "seed": seed, "seconds": seconds}
        taken: float | None = self._ask("warming up", do="warm", **question)["seconds"]
        return taken

    def limits(self, threads: int, memory_bytes: int) -> tuple[float, float]:
        """Measure the machine's limits. Returns (bytes read from memory, int8 multiply-adds) per second."""
        answer = self._ask("measuring the machine", do="limits", threads=threads, memory_bytes=memory_bytes)
        return answer["bandwidth"], answer["multiply"]

    def peak_memory(self) -> int:
        """Return the peak memory of the worker in bytes."""
        return int(self._ask("measuring its peak memory", do="peak")["peak"])

    def close(self) -> None:
        """End the process and give it time to clean up. Idempotent."""
        self._end(lambda: self._process.wait(_PATIENCE_S))

    def kill(self) -> None:
        """End the process immediately."""
        self._end(self._process.kill)

    def _end(self, end: Callable[[], object]) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            end()
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
        finally:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._stderr.close()

    def _ask(self, doing: str, **question: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise LlmrunError("the worker process of the benchmark is closed")
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._crashed(doing) from None
        while line := stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "progress" in answer:
                self._reporter.progress(answer["progress"])
            elif "note" in answer:
                self._reporter.note(answer["note"])
            elif "error" in answer:
                raise error_from_json(answer)
            else:
                return answer
        raise self._crashed(doing)

    def _crashed(self, doing: str) -> BackendCrashed:
        status = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        why = f": {shown(lines[-1], _LAST_WORDS)}" if lines else ""
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        return BackendCrashed(f"a worker process of the benchmark died while {doing}: {how}{why}")


def _started(command: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    """Start the worker in its own process group, so that Ctrl-C in the terminal reaches only the parent."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        **child_processes.in_own_group(),
        env=child_processes.environment(),
    )
