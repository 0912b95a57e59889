"""Tests of opening what a benchmark measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.jobs.bench.measuring.worker import open_target
from llmrun.jobs.bench.measuring.workload import BenchTarget, Room


@pytest.mark.parametrize("scales", [(), (0.5, 1.0)])
def test_adapters_are_applied_and_reported(tmp_path: Path, scales: tuple[float, ...]) -> None:
    (tmp_path / "model.json").write_text('{"answers": []}')
    paths = [tmp_path / f"{number}.gguf" for number, _ in enumerate(scales)]
    for path in paths:
        path.touch()
    adapters = [f"{path}:{scale}" for path, scale in zip(paths, scales, strict=True)]
    target = BenchTarget("m", str(tmp_path / "model.json"), backend="scripted", adapters=adapters)
    opened = open_target(target, Room(256, 1, False), progress=lambda what, done: None, note=pytest.fail)
    try:
        assert opened.facts.get("adapters", {}) == {str(number): scale for number, scale in enumerate(scales)}
    finally:
        opened.close()
