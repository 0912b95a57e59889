"""Compare answers with and without drafts for a few architectures; scripts/soak_speculation compares all."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.gguf.reader import open_gguf
from tests.soak.speculation_soak import CONTEXT, SEQUENCES, compare
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_architectures import tiny_architecture

pytestmark = pytest.mark.push

# Windows, keys shared by layers, sinks, latent attention, a recurrent state, experts.
NAMES = ["gemma3 pattern", "gemma4 E2B", "gpt-oss", "deepseek2", "lfm2", "qwen3moe"]


def open_cpu(path: Path) -> CpuBackend:
    with open_gguf(path) as file:
        return CpuBackend(file, OpenOptions(context_size=CONTEXT, max_sequences=SEQUENCES, threads=2))


def check(backend: Backend, drafters: list[str], count: int) -> None:
    try:
        tally = compare(backend, drafters, count, seed=1)
    finally:
        backend.close()
    assert tally.different == []
    assert tally.texts == 2 * count * len(drafters)
    assert 0 < tally.accepted < tally.drafted


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_answer_of_an_architecture(tmp_path: Path, name: str) -> None:
    path = tiny_architecture(tmp_path, name)
    check(open_cpu(path), ["mixed"], count=6)


def test_drafts_change_no_answer_of_the_real_model() -> None:
    check(open_cpu(smollm2()), ["lookup", "mixed"], count=2)
