"""The worker process, which opens one engine and runs workloads on it.

A separate process per engine makes it possible to measure each engine's peak memory, to let engines take turns, and to
keep the results of the other engines if one crashes.

Each line on stdin is a JSON request, called a question. For each one, the worker writes a line with the answer to
stdout, after any lines with notes and progress. worker_process.py, the only caller, describes the protocol.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, TextIO

from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.engine.child.codec import error_to_json
from llmrun.jobs.bench.measuring.sweep import BenchTarget, Room
from llmrun.jobs.bench.measuring.workload import Workload

Say = Callable[[Mapping[str, Any]], None]


class Worker:
    """Handles requests for one engine, and measures this machine."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._opened: Any = None  # This is an OpenTarget. Importing its module here would import an engine.
        self._machine: Any = None

    def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle one request and return the answer. Raises LlmrunError if it fails."""
        match question["do"]:
            case "open":
                return self._open(question)
            case "run":
                workload = Workload.from_json(question["workload"])
                return {"sample": self._opened.asker.run(workload, question["seed"]).to_json()}
            case "warm":
                return self._warm(Workload.from_json(question["workload"]), question["seed"], question["seconds"])
            case "limits":
                return self._limits(question["threads"], question["memory_bytes"])
            case "peak":
                from llmrun.base.machine.peak_memory import peak_memory

                return {"peak": peak_memory()}
        raise LlmrunError(f"unknown question: {question['do']}")

    def _warm(self, workload: Workload, seed: int, seconds: float) -> Mapping[str, Any]:
        try:
            return {"seconds": self._opened.asker.run(workload, seed, seconds).seconds}
        except Cancelled:
            return {"seconds": None}

    def close(self) -> None:
        """Close the engine, if it is open."""
        if self._opened is not None:
            self._opened.close()

    def _open(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        from llmrun.jobs.bench.measuring.target import open_target

        def progress(what: str, fraction: float) -> None:
            self._say({"progress": f"{what}  {fraction:.0%}"})

        def note(words: str) -> None:
            self._say({"note": words})

        self._opened = open_target(
            BenchTarget(**question["target"]), Room(**question["room"]), progress=progress, note=note
        )
        return {"facts": self._opened.facts}

    def _limits(self, n_threads: int, memory_bytes: int) -> Mapping[str, Any]:
        """Measure the limits of this machine. The buffer stays allocated after the first measurement."""
        from llmrun.backends.cpu.speeds.limits import MachineLimits

        if self._machine is None:
            self._machine = MachineLimits(n_threads, memory_bytes)
        return {"bandwidth": self._machine.read_bandwidth(), "multiply": self._machine.multiply_rate()}


def main() -> None:
    """Handle the requests on stdin until it is closed."""
    with _private_stdout() as stdout:

        def say(body: Mapping[str, Any]) -> None:
            stdout.write(json.dumps(body) + "\n")
            stdout.flush()

        with kernel_warnings_told(lambda words: say({"note": words})), closing(Worker(say)) as worker:
            for line in sys.stdin:
                try:
                    say(worker.answer(json.loads(line)))
                except LlmrunError as error:
                    say(error_to_json(error))


@contextmanager
def _private_stdout() -> Iterator[TextIO]:
    """Yield a private stdout for the answers. Output that libraries print to stdout goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)
        yield stdout


if __name__ == "__main__":
    main()
