"""Tests that a cold start passes its options on to the new process."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError
from llmrun.jobs.bench.measuring.runner import cold_start
from llmrun.jobs.bench.measuring.workload import BenchTarget

pytestmark = pytest.mark.push


def test_cold_starts_load_adapters(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"answers": []}')
    target = BenchTarget("m", str(tmp_path / "model.json"), backend="scripted", adapters=["/nowhere/a.gguf"])
    with pytest.raises(LlmrunError, match=r"no such adapter: /nowhere/a\.gguf"):
        cold_start(target)
