"""Tests of importance matrices: against llama-imatrix's on the real model, and of how chunks are added."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.team import InputSums
from llmrun.base.errors import Cancelled, LlmrunError, UnsupportedModel
from llmrun.jobs.evaluation.measuring import contexts_of
from llmrun.jobs.importance import ImatrixCollector, open_cpu_backend
from tests.support.gguf.gguf_files import write_gguf
from tests.support.models.downloads import smollm2
from tests.support.models.prompts import PASSAGES

TOKENS = np.arange(8, dtype=np.int32)
# The sum and the largest value of each entry that llama-imatrix (llama.cpp of llama-cpp-python 0.3.36) computes from
# 2 chunks of passages.txt with SmolLM2 135M in Q4_1.
THEIRS: dict[str, list[float]] = json.loads((PASSAGES.parent / "llama-imatrix.json").read_text(encoding="utf-8"))


class FakeTeam:
    """A team that finds the square of the chunk's number, for an input of two tensors and one of two experts."""

    needs_logits = False

    def __init__(self) -> None:
        self.found = [
            InputSums(["q", "k"], np.zeros((1, 2)), np.zeros(1, np.int64)),
            InputSums(["experts"], np.zeros((2, 2)), np.zeros(2, np.int64)),
        ]
        self.chunk = 0

    def clear(self) -> None:
        for found in self.found:
            found.sums[:] = found.counts[:] = 0

    def run(self, batch: Any) -> None:
        assert not batch.want.any()
        self.chunk += 1
        for found in self.found:
            found.sums[0] += self.chunk**2
            found.counts[0] += len(batch.tokens)
        if self.chunk == 2:
            raise Cancelled("generation stopped")
        if self.chunk == 4:
            self.found[1].sums[1, 0] = np.inf


def collector_of(team: FakeTeam) -> ImatrixCollector:
    kv = SimpleNamespace(free=lambda seq: None)
    backend = SimpleNamespace(kv=kv, forward=team.run, info=SimpleNamespace(path="m.gguf"))
    return ImatrixCollector(cast("Any", backend), cast("Any", team))


def test_chunks_add_up_and_failed_ones_leave_no_trace() -> None:
    collector = collector_of(FakeTeam())
    assert collector.add(TOKENS) == 1
    with pytest.raises(Cancelled):
        collector.add(TOKENS)
    assert collector.add(TOKENS) == 2
    with pytest.raises(LlmrunError, match=r"m\.gguf: chunk 3: the inputs of experts are not finite"):
        collector.add(TOKENS)
    entries = collector.entries()
    assert {name: (entry.sums.tolist(), entry.counts.tolist()) for name, entry in entries.items()} == {
        "q": ([10, 10], [16]),
        "k": ([10, 10], [16]),
        "experts": ([10, 10, 0, 0], [16, 0]),
    }
    assert collector.unused_experts() == {"experts": 1}


def test_models_that_the_cpu_engine_cannot_run_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t5.gguf", {"general.architecture": "t5"}, {"a": ("F32", np.ones(4, np.float32))})
    with pytest.raises(UnsupportedModel) as raised:
        open_cpu_backend(path, OpenOptions(backend="cpu"))
    assert "llama-imatrix" in raised.value.hint


@pytest.mark.night
def test_the_real_model_has_the_imatrix_of_llama_imatrix() -> None:
    """Both engines round activations to 8 bits, in different ways. With F32 weights, they agree within 2e-4."""
    backend = open_cpu_backend(smollm2(), OpenOptions(backend="cpu", context_size=512))
    chunks = contexts_of(PASSAGES.read_text(encoding="utf-8"), backend.tokenizer, 512, 2)
    with backend.summing() as team:
        collector = ImatrixCollector(backend, team)
        for chunk in chunks:
            collector.add(chunk)
    backend.close()
    ours = collector.entries()
    assert ours.keys() == THEIRS.keys()
    assert {entry.counts.tolist()[0] for entry in ours.values()} == {1024}
    found = np.array([[ours[name].sums.sum(), ours[name].sums.max()] for name in THEIRS])
    ratios = found / np.array(list(THEIRS.values()))
    assert np.abs(np.median(ratios, axis=0) - 1).max() < 0.002
    assert np.abs(ratios - 1).max() < 0.05
