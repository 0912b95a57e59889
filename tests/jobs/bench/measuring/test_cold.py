"""Tests that a cold start passes its options on to the new process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
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


@pytest.mark.parametrize("kv_type", [None, "q4_0"])
def test_cold_starts_use_the_requested_cache(monkeypatch: pytest.MonkeyPatch, kv_type: str | None) -> None:
    commands: list[Sequence[str]] = []

    def command(code: str, *arguments: str) -> list[str]:
        commands.append(arguments)
        return [sys.executable, "-c", "print('hello')"]

    monkeypatch.setattr("llmrun.base.processes.commands.command", command)
    cold_start(BenchTarget("m", "m.gguf", kv_type=kv_type))
    [arguments] = commands
    assert [value for flag, value in pairwise(arguments) if flag == "--kv-type"] == ([kv_type] if kv_type else [])
