"""Complete benchmarks with known verdicts: an engine against itself, and against a slowed-down copy of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmrun.bench.documents.document import Verdict
from llmrun.bench.measuring.reporter import BenchReporter
from llmrun.bench.measuring.results import is_precise, verdicts
from llmrun.bench.measuring.runner import Effort, Runner
from llmrun.bench.measuring.sweep import BenchTarget, configurations
from llmrun.bench.measuring.worker_process import WorkerProcess
from llmrun.bench.measuring.workload import Workload

PLAIN, OTHER = "A", "B"


@dataclass(frozen=True)
class Known:
    """The verdicts of one benchmark, and whether they are as expected.

    rounds  the number of rounds it took
    """

    verdicts: tuple[Verdict, ...]
    rounds: int

    @property
    def claims_a_difference(self) -> bool:
        return any(verdict.is_different for verdict in self.verdicts)

    @property
    def finds_it_slower(self) -> bool:
        """True if every metric is significantly slower."""
        return all(verdict.is_different and verdict.ratio < 1 for verdict in self.verdicts)

    def __str__(self) -> str:
        words = (f"{one.metric} {one.ratio:.3f} ({one.low:.3f} to {one.high:.3f})" for one in self.verdicts)
        return f"{', '.join(words)}, {self.rounds} rounds"


class Quiet:
    def progress(self, words: str, share: float | None = None) -> None:
        """Ignore progress."""

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None:
        """Ignore progress."""

    def note(self, words: str) -> None:
        sys.stderr.write(f"note: {words}\n")


def known_runs(
    path: str, backend: str, workload: Workload, *, count: int, seconds: float, slowed_by: float = 1.0
) -> Iterator[Known]:
    """Compare a model with itself in two processes, the second slowed down by a factor. Repeats `count` times."""

    def start(target: BenchTarget, reporter: BenchReporter) -> WorkerProcess:
        if target.model == PLAIN or slowed_by == 1.0:
            return WorkerProcess(reporter)
        return WorkerProcess(reporter, [sys.executable, "-m", "tests.support.bench.slowed_worker", str(slowed_by)])

    targets = [BenchTarget(name, path, backend=backend) for name in (PLAIN, OTHER)]
    for _ in range(count):
        effort = Effort(seconds, None, is_precise)
        trials = Runner(configurations(targets, [workload]), effort, Quiet(), start).run().trials
        for trial in trials:
            if trial.failure is not None:
                raise trial.failure
        yield Known(tuple(verdicts(trials)), len(trials[0].samples))
