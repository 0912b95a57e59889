"""Compares a model with itself and with a slowed copy of itself, in the same way as `llmrun bench` compares models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from llmrun.jobs.bench.documents.document import Verdict
from llmrun.jobs.bench.measuring.pool import BenchReporter, WorkerProcess
from llmrun.jobs.bench.measuring.results import is_precise, verdicts
from llmrun.jobs.bench.measuring.runner import Effort, Runner
from llmrun.jobs.bench.measuring.workload import BenchTarget, configurations, synthetic
from scripts.compare_servers import Quiet
from tests.soak.driver import Broken, Case, Soak

_SECONDS = 15.0  # per comparison
_SLOWED_BY = "1.05"
_SLOWED_EVERY = 5  # every so many comparisons, the second process is slowed
_MOST_CLAIMED = 1 / 20  # share of the equal pairs for which a difference is claimed; verdicts are at the 99 % level
_MOST_MISSED = 1 / 10  # share of the slowed pairs that are not detected


def bench(soak: Soak) -> Iterator[Case]:
    """Count false claims and missed differences. The machine must be idle, and 40 comparisons take ten minutes."""
    path, counts = str(soak.path()), soak.counts

    def case(number: int) -> str:
        if (number + 1) % _SLOWED_EVERY:
            found = _compared(path, slowed_by="")
            counts["claimed differences"] += any(each.is_different for each in found)
            outcome = "equal pairs"
        else:
            found = _compared(path, slowed_by=_SLOWED_BY)
            counts["missed differences"] += not all(each.is_different and each.ratio < 1 for each in found)
            outcome = "slowed pairs"
        words = (f"{each.metric} {each.ratio:.3f} ({each.low:.3f} to {each.high:.3f})" for each in found)
        soak.say(f"case {number}, {outcome}: {', '.join(words)}")
        return outcome

    yield case
    if counts["claimed differences"] > 1 + _MOST_CLAIMED * counts["equal pairs"]:
        raise Broken(f"{counts['claimed differences']} of {counts['equal pairs']} equal pairs were called different")
    if counts["missed differences"] > 1 + _MOST_MISSED * counts["slowed pairs"]:
        raise Broken(f"{counts['missed differences']} of {counts['slowed pairs']} slowed pairs were not detected")


def _compared(path: str, slowed_by: str) -> Sequence[Verdict]:
    """Return the verdicts of comparing a model with itself in two processes, of which the second may be slowed."""

    def start(target: BenchTarget, reporter: BenchReporter) -> WorkerProcess:
        if target.model == "A" or not slowed_by:
            return WorkerProcess(reporter)
        return WorkerProcess(reporter, [sys.executable, "-m", "tests.support.bench.slowed_worker", slowed_by])

    targets = [BenchTarget(name, path, backend="cpu") for name in "AB"]
    sweep = configurations(targets, [synthetic(64, 32, 0, 1)])
    trials = Runner(sweep, Effort(_SECONDS, None, is_precise), Quiet(), start).run().trials
    for trial in trials:
        if trial.failure is not None:
            raise trial.failure
    return list(verdicts(trials))
