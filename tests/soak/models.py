"""Opens broken models and lets them answer, in a worker process that may crash or hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tests.soak import model_runs
from tests.soak.driver import Broken, Case, Soak
from tests.soak.model_mutations import bases, mutant

CORPUS = Path(__file__).resolve().parent / "corpus"
BACKENDS = ("cpu", "llama")
_HANG_S = 60.0  # compiling a kernel takes seconds
_PROCESS_EVERY = 250  # of so many cases, the last one runs in an `llmrun generate` of its own
_MOST_MEMORY = 4 << 30  # address space in bytes, of the worker and of each process that it starts
_START_S = 60.0


def models(soak: Soak) -> Iterator[Case]:
    """Run a mutant per case, on both backends in turn. Even numbers run on the CPU engine.

    A case ends in an answer or an error with exit code 3, or 8 if the file declares a context of a few tokens. Any
    other exit code, a warning, a signal, a hang and too much memory are findings, and the file is saved in the corpus.
    Commit it together with the fix.
    """
    worker = Worker(soak.folder)
    for number, (draft, _) in enumerate(bases()):
        path = model_runs.write(soak.folder, draft.build())
        for backend in BACKENDS:
            if (ended := worker.run(path, backend, number)) != (0, "answered"):
                raise Broken(f"a valid model ends with {ended} on {backend}")

    def case(number: int) -> str:
        nonlocal worker
        backend, data = BACKENDS[number % 2], mutant(soak.seed, number)
        path = model_runs.write(soak.folder, data)
        if (number + 1) % _PROCESS_EVERY:
            code, outcome = worker.run(path, backend, number)
        else:
            code, outcome = model_runs.generate_in_new_process(path, backend, number)
        if code not in model_runs.ALLOWED:
            kind = re.sub(r"[^a-z]+", "-", outcome.lower())[:60].strip("-")
            (CORPUS / f"{backend}-{kind}-seed-{soak.seed}-case-{number}.gguf").write_bytes(data)
            if code is None:
                worker.end()
                worker = Worker(soak.folder)
            raise Broken(f"{backend}: exit code {code}, {outcome}")
        return f"{code} {outcome}"

    try:
        yield case
    finally:
        worker.end()


class Worker:
    """A process that runs thousands of models one after the other, like a long session."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr"
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, str(self._errors)), daemon=False)
        self._process.start()
        theirs.close()
        if not self._ours.poll(_START_S):
            raise RuntimeError("the worker does not start")
        self._ours.recv()

    def run(self, path: Path, backend: str, case: int) -> tuple[int | None, str]:
        """Return the exit code and the outcome of a case, or None and how the worker ended."""
        try:
            self._ours.send((path, backend, case))
            if not self._ours.poll(_HANG_S):
                return None, f"no end after {_HANG_S:.0f} s"
            code, outcome = self._ours.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            return None, f"the worker died: {how} {_last_words(self._errors.read_text(errors='replace'))}".strip()
        return code, outcome

    def end(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
        self._process.kill()
        self._process.join()
        self._ours.close()


def _work(requests: Connection, errors: str) -> None:
    """Run the requested cases in the worker. Whatever libraries print goes to a file."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    requests.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            requests.send(model_runs.generate(*requests.recv()))


def _last_words(text: str) -> str:
    """Return the line with the message of a failed assertion or exception, or else the last line."""
    lines = text.strip().splitlines()
    telling = [line for line in lines if re.search(r"assert|abort|what\(\)|Error:", line, re.IGNORECASE)]
    return (telling or lines or [""])[-1][:200]
