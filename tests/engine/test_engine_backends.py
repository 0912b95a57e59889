"""The engine keeps its promises over every backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.backends.cpu import CpuBackend
from llmrun.backends.paged_kv import BLOCK, PagedKV
from llmrun.backends.scripted import ScriptedBackend
from llmrun.gguf.reader import open_gguf
from tests.support.downloads import smollm2
from tests.support.engine_contract import (
    CancelContract,
    CompanyContract,
    CrowdedContract,
    PrefixContract,
    StopStringContract,
)
from tests.support.engine_machine import run_engine_machine
from tests.support.tiny_models import tiny_model


class TestScripted(StopStringContract, PrefixContract, CancelContract, CrowdedContract):
    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, capacity=capacity)


class TestScriptedWithCheckpoints(PrefixContract, CancelContract, CrowdedContract):
    """As a recurrent model: what is kept of a prefix is less than was asked."""

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, checkpoint=16)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(
            None, context_size=context_size, max_sequences=max_sequences, capacity=capacity, checkpoint=16
        )

    def kept(self, n: int, *, of: int) -> int:
        return n if n == of else n - n % 16


def open_cpu(path: Path, *, context_size: int, max_sequences: int) -> CpuBackend:
    with open_gguf(path) as file:
        return CpuBackend(file, context_size=context_size, max_sequences=max_sequences, threads=2)


def open_crowded_cpu(path: Path, *, capacity: int, context_size: int, max_sequences: int) -> CpuBackend:
    """One whose cache is told that most of its memory is not there."""
    backend = open_cpu(path, context_size=context_size, max_sequences=max_sequences)
    backend.kv = PagedKV(backend.kv._memory[:, : capacity // BLOCK], max_sequences, context_size)
    return backend


class TestTinyModelOnTheCpu(StopStringContract, PrefixContract, CancelContract, CrowdedContract):
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_model(tmp_path_factory.mktemp("engine"), "Q8_0 one KV head")

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(cls.path, context_size=context_size, max_sequences=max_sequences)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> CpuBackend:
        return open_crowded_cpu(cls.path, capacity=capacity, context_size=context_size, max_sequences=max_sequences)


class TestRealModelOnTheCpu(StopStringContract, CompanyContract, CancelContract):
    answer_tokens = 16
    places = 4
    trials = 4

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(smollm2(), context_size=context_size, max_sequences=max_sequences)


@pytest.mark.parametrize("capacity", [None, 120])
@pytest.mark.parametrize("checkpoint", [None, 16])
def test_anything_in_any_order_on_the_scripted_backend(capacity: int | None, checkpoint: int | None) -> None:
    backend = ScriptedBackend(None, context_size=100, max_sequences=3, capacity=capacity, checkpoint=checkpoint)
    run_engine_machine(backend, alone=ScriptedBackend(None, context_size=100), examples=25)


def test_anything_in_any_order_on_the_cpu(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "Q4_0 small heads")
    backend = open_crowded_cpu(path, capacity=128, context_size=96, max_sequences=3)
    alone = open_cpu(path, context_size=96, max_sequences=1)
    try:
        run_engine_machine(backend, alone=alone, examples=25)
    finally:
        backend.close()
        alone.close()
