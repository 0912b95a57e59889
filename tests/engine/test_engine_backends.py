"""Tests that the engine keeps its promises with every backend."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import BLOCK
from llmrun.options.sampling_params import SamplingParams
from tests.support.backends.sliding_window import WINDOW, tiny_sliding_window
from tests.support.backends.windowed_plans import windows_in_plans
from tests.support.engine.answers import answer_all
from tests.support.engine.contract import (
    CancelContract,
    CompanyContract,
    CrowdedContract,
    EchoContract,
    PrefixContract,
    StopStringContract,
    plain_tokens,
)
from tests.support.engine.drafts import PROPOSALS, Propose
from tests.support.engine.machine import run_engine_machine
from tests.support.engine.speculation_contract import SpeculationContract
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push


class TestScripted(
    StopStringContract, PrefixContract, CancelContract, CrowdedContract, SpeculationContract, EchoContract
):
    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, capacity=capacity)


class TestScriptedWithCheckpoints(PrefixContract, CancelContract, CrowdedContract, SpeculationContract, EchoContract):
    """The scripted backend as a recurrent model, which keeps less of a prefix than was asked for."""

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(None, context_size=context_size, max_sequences=max_sequences, checkpoint=16)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> ScriptedBackend:
        return ScriptedBackend(
            None, context_size=context_size, max_sequences=max_sequences, capacity=capacity, checkpoint=16
        )

    def assert_kept(self, cached: int, n: int, *, of: int) -> None:
        assert cached == (n if n == of else n - n % 16)


def open_cpu(path: Path, *, context_size: int, max_sequences: int) -> CpuBackend:
    with open_gguf(path) as file:
        return CpuBackend(file, OpenOptions(context_size=context_size, max_sequences=max_sequences, threads=2))


def open_crowded_cpu(path: Path, *, capacity: int, context_size: int, max_sequences: int) -> CpuBackend:
    """Open a backend whose cache is told that it has only part of its memory."""
    backend = open_cpu(path, context_size=context_size, max_sequences=max_sequences)
    [pool] = backend.kv._pools
    fewer = [memory[:, : capacity // BLOCK] for memory in pool._memory]
    backend.kv = PagedKV({0: fewer}, max_sequences, context_size)
    return backend


class TestTinyModelOnTheCpu(
    StopStringContract, PrefixContract, CancelContract, CrowdedContract, SpeculationContract, EchoContract
):
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


@pytest.mark.night
class TestRealModelOnTheCpu(StopStringContract, CompanyContract, CancelContract):
    answer_tokens = 16
    places = 4
    trials = 2

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(smollm2(), context_size=context_size, max_sequences=max_sequences)


def open_llama(path: Path, *, capacity: int | None = None, context_size: int, max_sequences: int) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(
            file,
            # Two threads that spin at barriers would be a hundred times slower beside other programs.
            OpenOptions(
                context_size=context_size, max_sequences=max_sequences, kv_tokens=capacity, threads=1, gpu_layers=0
            ),
        )


def test_nobody_starts_again_where_sequences_share_cells(tmp_path: Path) -> None:
    """Copies of a prefix share its cells, so the lengths of all sequences exceed the size of the cache."""
    backend = open_llama(tiny_model(tmp_path, "F32"), capacity=256, context_size=256, max_sequences=8)
    engine, stem = Engine(backend), plain_tokens(backend, 60, seed=0)
    never = SamplingParams(temperature=0, logit_bias=dict.fromkeys(backend.tokenizer.end_of_generation, -math.inf))

    def request(prompt: list[int], max_tokens: int) -> Request:
        return Request(TokenPrompt(tuple(prompt)), max_tokens, sampling=never)

    try:
        answer_all(engine, [request([*stem, *plain_tokens(backend, 2, seed=seed)], 1) for seed in range(8)])
        assert sum(backend.kv.lengths) > backend.kv.capacity
        answer_all(engine, [request(plain_tokens(backend, 8, seed=seed), 165) for seed in (8, 9)])
        assert engine.status().preemptions == 0
    finally:
        engine.close()


class TestTinyModelOnLlamaCpp(
    StopStringContract, PrefixContract, CancelContract, CrowdedContract, SpeculationContract, EchoContract
):
    """Greedy tokens may differ slightly from those generated alone, because llama.cpp's summation order depends on the
    batch.
    """

    exact = False
    tolerance = 0.02  # at most 0.003 was measured
    places = 10
    trials = 12
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_model(tmp_path_factory.mktemp("engine"), "F32 odd")

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> LlamaBackend:
        return open_llama(cls.path, context_size=context_size, max_sequences=max_sequences)

    @classmethod
    def open_crowded(cls, *, capacity: int, context_size: int, max_sequences: int) -> LlamaBackend:
        return open_llama(cls.path, capacity=capacity, context_size=context_size, max_sequences=max_sequences)


@pytest.mark.night
class TestRealModelOnLlamaCpp(StopStringContract, CompanyContract):
    exact = False
    tolerance = 1.0  # at most 0.35 was measured; a token's logits span 30
    answer_tokens = 8
    places = 2

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> LlamaBackend:
        return open_llama(smollm2(), context_size=context_size, max_sequences=max_sequences)


class TestWindowsOnTheCpu(PrefixContract, CancelContract, SpeculationContract, EchoContract):
    """Two of three layers keep only the tokens of a window and a step, and 256 more for truncation."""

    context = 1536
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", layers=3)

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> CpuBackend:
        with windows_in_plans(WINDOW, 2 * WINDOW, 0):
            return open_cpu(cls.path, context_size=context_size, max_sequences=max_sequences)

    @pytest.mark.parametrize(("back_to", "kept"), [(1206, 1206), (1150, 1150), (800, 800), (300, 0), (WINDOW - 1, 0)])
    def test_a_long_conversation_is_taken_back(self, backend: CpuBackend, back_to: int, kept: int) -> None:
        assert_taken_back(self, backend, back_to, kept)


class TestHybridOnTheCpu(PrefixContract, CancelContract, SpeculationContract, EchoContract):
    """A sequence with a recurrent state can be cut by a few tokens, or further back to a checkpoint."""

    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_architecture(tmp_path_factory.mktemp("engine"), "qwen35")

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> CpuBackend:
        return open_cpu(cls.path, context_size=context_size, max_sequences=max_sequences)

    def assert_kept(self, cached: int, n: int, *, of: int) -> None:
        assert cached == n if n == of else cached <= n


@pytest.mark.night
class TestSlidingWindowOnLlamaCpp(PrefixContract, CancelContract, SpeculationContract):
    """Tokens that no layer sees any more are dropped, so the cache cannot be truncated to an arbitrary position."""

    exact = False
    tolerance = 0.02
    context = 1536
    trials = 5
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_sliding_window(tmp_path_factory.mktemp("engine") / "window.gguf")

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> LlamaBackend:
        return open_llama(cls.path, context_size=context_size, max_sequences=max_sequences)

    @pytest.mark.parametrize(("back_to", "kept"), [(1206, 1206), (1150, 1150), (1000, 1000), (300, 0), (WINDOW - 1, 0)])
    def test_a_long_conversation_is_taken_back(self, backend: LlamaBackend, back_to: int, kept: int) -> None:
        assert_taken_back(self, backend, back_to, kept)


def assert_taken_back(contract: PrefixContract, backend: Backend, back_to: int, kept: int) -> None:
    """Assert that a conversation of 1,207 tokens can change at position `back_to` and reuses `kept` tokens."""
    engine = Engine(backend)
    first = contract.request(backend, plain_tokens(backend, 1200, seed=1), 7)
    [answer] = answer_all(engine, [first])
    history = [*plain_tokens(backend, 1200, seed=1), *answer.tokens]
    other = [token for token in plain_tokens(backend, 30, seed=2) if token != history[back_to]]
    second = contract.request(backend, history[:back_to] + other, 7)
    [gathered] = answer_all(engine, [second])
    assert gathered.finished.timings.cached_tokens == kept
    contract.assert_answers(backend, second, gathered)


DRAFTED = pytest.mark.parametrize("propose", [None, PROPOSALS["mixed"]], ids=["plain", "drafted"])


@pytest.mark.cover(1)
@DRAFTED
@pytest.mark.parametrize("capacity", [None, 120])
@pytest.mark.parametrize("checkpoint", [None, 16])
def test_anything_in_any_order_on_the_scripted_backend(
    capacity: int | None, checkpoint: int | None, propose: Propose | None
) -> None:
    backend = ScriptedBackend(None, context_size=100, max_sequences=3, capacity=capacity, checkpoint=checkpoint)
    run_engine_machine(backend, alone=ScriptedBackend(None, context_size=100), examples=20, propose=propose)


@pytest.mark.night
@DRAFTED
@pytest.mark.parametrize("overcommit", [False, True])
def test_anything_in_any_order_beside_cached_prefixes(overcommit: bool, propose: Propose | None) -> None:
    backend = ScriptedBackend(None, context_size=100, max_sequences=6, capacity=160)
    alone = ScriptedBackend(None, context_size=100)
    run_engine_machine(backend, alone=alone, examples=20, propose=propose, max_running=3, overcommit=overcommit)


@DRAFTED
def test_anything_in_any_order_with_a_recurrent_state(tmp_path: Path, propose: Propose | None) -> None:
    path = tiny_architecture(tmp_path, "granitehybrid")
    backend = open_cpu(path, context_size=96, max_sequences=3)
    alone = open_cpu(path, context_size=96, max_sequences=1)
    try:
        run_engine_machine(backend, alone=alone, examples=20, propose=propose)
    finally:
        backend.close()
        alone.close()


@DRAFTED
@pytest.mark.parametrize("overcommit", [False, True])
def test_anything_in_any_order_on_the_cpu(tmp_path: Path, overcommit: bool, propose: Propose | None) -> None:
    path = tiny_model(tmp_path, "Q4_0 small heads")
    backend = open_crowded_cpu(path, capacity=128, context_size=96, max_sequences=5)
    alone = open_cpu(path, context_size=96, max_sequences=1)
    try:
        run_engine_machine(backend, alone=alone, examples=20, propose=propose, max_running=3, overcommit=overcommit)
    finally:
        backend.close()
        alone.close()


@pytest.mark.night
@DRAFTED
def test_anything_in_any_order_on_llama_cpp(tmp_path: Path, propose: Propose | None) -> None:
    path = tiny_model(tmp_path, "F32")
    backend = open_llama(path, capacity=256, context_size=128, max_sequences=3)
    try:
        run_engine_machine(backend, alone=None, examples=15, propose=propose)
    finally:
        backend.close()
