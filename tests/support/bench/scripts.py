"""Scripted-backend targets for benchmarks, with steps of a given duration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration, Workload, synthetic

SHORT = synthetic(8, 4, 0, 1)


def target_of(folder: Path, name: str = "model", *, step_seconds: float = 0.0, **options: float) -> BenchTarget:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"step_seconds": step_seconds, **options}))
    return BenchTarget(name, str(path), backend="scripted")


def configuration_of(target: BenchTarget, workload: Workload = SHORT) -> Configuration:
    return Configuration(target.model, target, workload)


class Notes:
    """A reporter that records its calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.going_on: list[str] = []
        self.watched: list[Callable[[], tuple[str, float | None]]] = []

    def progress(self, words: str, share: float | None = None) -> None:
        assert share is None or 0 <= share <= 1
        self.going_on.append(words)

    def watch(self, tell: Callable[[], tuple[str, float | None]]) -> None:
        self.watched.append(tell)
        self.progress(*tell())

    def note(self, words: str) -> None:
        self.said.append(words)
