"""Run thousands of model files in workers that may crash or hang. Each outcome is recorded and the next case
continues."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.soak import model_runs
from tests.soak.model_mutations import mutant

CHUNK = 250  # cases per request to a worker, and per line of the log
PROCESS_CHUNK = 10  # the same if each case has its own process
HANG_SECONDS = 20.0
MOST_MEMORY = 4 << 30  # address space in bytes, per worker and per child process
MOST_FILES = 3  # files saved per kind of finding


@dataclass
class Tally:
    """The outcomes of all cases. `findings` are sentences, and `worker_seconds` is the total over all workers."""

    outcomes: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    worker_seconds: float = 0.0

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add(self, other: Tally) -> None:
        for outcome, n in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + n
        self.findings += other.findings
        self.worker_seconds += other.worker_seconds


def work(requests: TextIO, answers: TextIO) -> None:
    """Run the requested cases in the worker, one request per line, and report each when it ends."""
    if sys.platform == "win32":
        raise NotImplementedError("needs resource limits")
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    own = os.fdopen(os.dup(answers.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), answers.fileno())  # keeps library output out of the answers
    with tempfile.TemporaryDirectory() as folder:
        for line in requests:
            asked = json.loads(line)
            run = model_runs.generate_in_new_process if asked["in_processes"] else model_runs.generate
            for case in range(asked["first"], asked["last"]):
                path = model_runs.write(Path(folder), mutant(asked["seed"], case))
                code, outcome = run(path, asked["backend"], case)
                own.write(json.dumps([code, outcome]) + "\n")
    model_runs.close_llama_process()


class Worker:
    """A worker process and its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the worker
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, start_new_session=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker died; the next `answer` reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> tuple[int | None, str]:
        """Return (exit code, outcome) of the next case, or (None, reason) if there is none."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None, f"HANG of more than {seconds:g} s"
        if line:
            code, outcome = json.loads(line)
            return code, outcome
        returned = self._process.wait()
        self._errors.seek(0)
        words = _last_words(self._errors.read())
        how = signal.Signals(-returned).name if returned < 0 else f"exit {returned}"
        return None, f"DEATH by {how} {words}".strip()

    def end(self) -> None:
        """Kill the worker and everything it started. Idempotent."""
        if sys.platform == "win32":
            raise NotImplementedError("needs POSIX signals")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()


def _last_words(text: str) -> str:
    """Return the line with the message of a failed assertion or exception, or else the last line."""
    lines = text.strip().splitlines()
    telling = [line for line in lines if re.search(r"assert|abort|what\(\)|Error:", line, re.IGNORECASE)]
    return re.sub(r"\d+", "N", (telling or lines or [""])[-1])[:200]


@dataclass(frozen=True)
class Soak:
    """Cases `first` to `first + count` of a seed on one backend.

    log       a JSON line per finished chunk; chunks already in the log are skipped
    findings  the folder for files that cause findings
    command   starts a worker
    """

    backend: str
    seed: int
    first: int
    count: int
    jobs: int
    findings: Path
    command: Sequence[str]
    in_processes: bool = False
    log: Path | None = None
    hang_seconds: float = HANG_SECONDS

    def run(self, report: Callable[[str], None]) -> Tally:
        total, started, done = Tally(), time.monotonic(), 0
        last = self.first + self.count
        size = PROCESS_CHUNK if self.in_processes else CHUNK
        chunks = [(start, min(start + size, last)) for start in range(self.first, last, size)]
        known = self._known()
        waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        finished: queue.SimpleQueue[tuple[int, int, Tally] | None] = queue.SimpleQueue()
        for chunk in chunks:
            if chunk in known:
                total.add(known[chunk])
            else:
                waiting.put(chunk)
        to_do = waiting.qsize()
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [pool.submit(self._job, waiting, finished) for _ in range(self.jobs)]
            while done < to_do:
                result = finished.get()
                if result is None:
                    break  # a job ended early; its exception is raised below
                first, last, tally = result
                self._remember(first, last, tally)
                total.add(tally)
                done += 1
                rate = done * size / (time.monotonic() - started)
                report(f"{self.backend}: {done} of {to_do} chunks, {rate:.0f} cases a second")
            for job in jobs:
                job.result()
        return total

    def _job(
        self,
        waiting: queue.SimpleQueue[tuple[int, int]],
        finished: queue.SimpleQueue[tuple[int, int, Tally] | None],
    ) -> None:
        """Run chunks in one worker, replacing it whenever it dies."""
        worker = Worker(self.command)
        try:
            while True:
                try:
                    first, last = waiting.get_nowait()
                except queue.Empty:
                    return
                tally, started = Tally(), time.monotonic()
                case = first
                while case < last:
                    self._ask(worker, case, last)
                    case, alive = self._follow(worker, case, last, tally)
                    if not alive:
                        worker.end()
                        worker = Worker(self.command)
                tally.worker_seconds = time.monotonic() - started
                finished.put((first, last, tally))
        except BaseException:
            finished.put(None)
            raise
        finally:
            worker.end()

    def _ask(self, worker: Worker, first: int, last: int) -> None:
        request = {"backend": self.backend, "seed": self.seed, "in_processes": self.in_processes}
        worker.ask(request | {"first": first, "last": last})

    def _follow(self, worker: Worker, case: int, last: int, tally: Tally) -> tuple[int, bool]:
        """Count outcomes until the last case or the worker's death. Returns (the next case, whether the worker is
        alive)."""
        while case < last:
            code, outcome = worker.answer(self.hang_seconds)
            tally.count(outcome if code is None else f"{code} {outcome}")
            if code not in model_runs.ALLOWED:
                self._save(case, outcome, tally)
            case += 1
            if code is None:
                return case, False
        return case, True

    def _save(self, case: int, outcome: str, tally: Tally) -> None:
        self.findings.mkdir(parents=True, exist_ok=True)
        kind = re.sub(r"[^a-z]+", "-", outcome.lower())[:60].strip("-")
        name = f"{self.backend}-{kind}-seed-{self.seed}-case-{case}.gguf"
        if len(list(self.findings.glob(f"{self.backend}-{kind}-seed-*"))) < MOST_FILES:
            (self.findings / name).write_bytes(mutant(self.seed, case))
        tally.findings.append(f"case {case} of seed {self.seed} on {self.backend}: {outcome}")

    # The log

    def _settings(self) -> dict[str, Any]:
        return {"backend": self.backend, "seed": self.seed, "in_processes": self.in_processes}

    def _known(self) -> dict[tuple[int, int], Tally]:
        if self.log is None or not self.log.exists():
            return {}
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
        mine = [line for line in lines if self._settings().items() <= line.items()]
        return {(line["first"], line["last"]): Tally(**line["tally"]) for line in mine}

    def _remember(self, first: int, last: int, tally: Tally) -> None:
        if self.log is not None:
            line = self._settings() | {"first": first, "last": last, "tally": asdict(tally)}
            with self.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
