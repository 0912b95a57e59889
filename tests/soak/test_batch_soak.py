"""A small version of scripts/soak_batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.batching.killing import kill_runs


@pytest.mark.push
def test_a_killed_batch_loses_nothing(tmp_path: Path) -> None:
    model = ["-m", "x", "--backend", "scripted", "--parallel", "4"]
    found = kill_runs(tmp_path, model, kills=5, lines=80, seed=7, slots=8, say=lambda words: None)
    assert found.problems == []
    assert found.killed >= 5
