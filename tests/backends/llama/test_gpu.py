"""Tests of llama.cpp on a real NVIDIA GPU. scripts/test_gpu runs them.

llama.cpp can present one GPU as two devices, so dividing layers is tested on machines with one GPU, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import AUTO, Backend, OpenOptions
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.kind import Gpus
from llmrun.backends.llama import probe
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.gpu_check import try_llama
from llmrun.backends.llama.gpu_layers import bytes_needed, layer_sizes
from llmrun.backends.llama.process import LlamaProcess
from llmrun.errors import BackendCrashed, DoesNotFit, UsageError
from llmrun.gguf.reader import open_gguf
from llmrun.machine.energy import nvidia_cards
from llmrun.machine.gpus import gpus
from tests.support.backends.fake_gpus import GIB
from tests.support.backends.offloading import (
    OPTIONS,
    assert_agree,
    assert_similar,
    assert_usable_after_a_stop,
    cuda_buffers,
    logits_of_smollm2,
    open_llama,
)
from tests.support.backends.recurrent import tiny_recurrent
from tests.support.backends.seam_contract import FullCacheContract, SeamContract, batch_of, rows
from tests.support.engine.contract import CancelContract, PrefixContract
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import TINY_MODELS, tiny_model

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LAYERS = 31  # of SmolLM2, including the output layer
PROGRAM = GIB  # upper bound of CUDA's own memory (kernels, handles and workspaces), which `auto` leaves free


@pytest.fixture(scope="module", autouse=True)
def names() -> tuple[str, ...]:
    """Return the names of the GPUs, of which there must be at least one."""
    found = probe.gpus()
    assert found.names, f"{found.reason}; run scripts/test_gpu on a machine with an NVIDIA GPU"
    return found.names


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Present the first GPU as two devices. Returns their names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")
    found = probe.gpus().names
    assert len(found) == 2
    return found


# --- detection --------------------------------------------------------------------------------------------------------


def test_llama_cpp_and_the_driver_find_the_same_gpus(names: tuple[str, ...]) -> None:
    cards = nvidia_cards()
    assert sorted(names) == sorted(card.name for card in cards)
    assert [(gpu.maker, gpu.name) for gpu in gpus() if gpu.maker == "NVIDIA"] == [("NVIDIA", c.name) for c in cards]
    assert all(card.driver for card in cards)


def test_llama_cpp_and_the_driver_agree_on_the_memory() -> None:
    """The driver counts memory that it keeps for itself, and llama.cpp's process needs some before it can ask."""
    cards = {card.name: card for card in nvidia_cards()}
    for device in probe.usable_gpus():
        card = cards[device["description"]]
        assert 0.95 * card.memory < device["total"] <= card.memory
        assert card.memory_free - PROGRAM < device["free"] <= device["total"]


def test_hidden_gpus_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe.gpus() == Gpus((), "llama.cpp found no GPU")


def test_the_trial_multiplies_on_the_gpu(names: tuple[str, ...]) -> None:
    trial = try_llama()
    assert trial is not None
    assert (trial.failure, trial.offloads) == ("", True)
    assert tuple(gpu["description"] for gpu in trial.gpus) == names


# --- the contracts of backends ----------------------------------------------------------------------------------------


class TestSeam(SeamContract, FullCacheContract):
    exact = False

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.path = tiny_model(tmp_path, "F32")

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return on_the_gpu(
            open_llama(self.path, context_size=context_size, max_sequences=max_sequences, gpu_layers="all")
        )

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=256, kv_tokens=256, max_sequences=max_sequences, gpu_layers="all")


class TestSeamOfARecurrentModel(SeamContract):
    exact = False
    goes_back = False

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.path = tiny_recurrent(tmp_path / "tiny.gguf", width=64, state=16)

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return on_the_gpu(
            open_llama(self.path, context_size=context_size, max_sequences=max_sequences, gpu_layers="all")
        )


class TestEngine(PrefixContract, CancelContract):
    exact = False
    tolerance = 0.04  # half a percent of the range of the logits, as in TestSeam
    trials = 5
    path: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.path = tiny_model(tmp_path_factory.mktemp("engine"), "F32")

    @classmethod
    def open_backend(cls, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(cls.path, context_size=context_size, max_sequences=max_sequences, gpu_layers="all")


def on_the_gpu(backend: LlamaBackend) -> LlamaBackend:
    """Check that all layers are on a GPU, and return the backend."""
    on_gpus, _, of_the_model = backend.info.gpu_layers.partition("/")
    assert on_gpus == of_the_model != ""
    assert any(purpose == "model" for _, purpose in cuda_buffers(backend.log))
    return backend


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "placed"),
    [
        ({"gpu_layers": "all"}, LAYERS),
        ({"gpu_layers": AUTO}, LAYERS),
        ({"gpu_layers": 12}, 12),
        ({"gpu_layers": 1}, 1),
        ({"gpu_layers": "all", "kv_type": "q8_0"}, LAYERS),
    ],
    ids=["all", "auto", "12 layers", "only the output", "8-bit cache"],
)
def test_logits_match_the_cpu(options: dict[str, Any], placed: int, names: tuple[str, ...]) -> None:
    actual, device = logits_of_smollm2(**options)
    expected, on_the_cpu = logits_of_smollm2(gpu_layers=0, kv_type=options.get("kv_type", "f16"))
    assert (device, on_the_cpu) == (f"{placed}/{LAYERS} layers on {' and '.join(names)}, 1 thread", "1 thread")
    assert_similar(actual, expected)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_of_all_weight_types_match_the_cpu(name: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, name)
    batches = [batch_of(rows(0, 0, list(range(5, 85)))), batch_of(rows(0, 80, [85]))]
    found = []
    for gpu_layers in ("all", 0):
        backend = open_llama(path, gpu_layers=gpu_layers)
        found.append(np.concatenate([backend.forward(batch).logits for batch in batches]))
        backend.close()
    (assert_similar if "Q" in name else assert_agree)(*found)


def test_logits_of_a_recurrent_model_match_the_cpu(tmp_path: Path) -> None:
    path = tiny_recurrent(tmp_path / "tiny.gguf", width=64, state=16)
    found = []
    for gpu_layers in ("all", 0):
        backend = open_llama(path, gpu_layers=gpu_layers)
        found.append(backend.forward(batch_of(rows(0, 0, list(range(5, 85))))).logits)
        backend.close()
    assert_agree(*found)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, [0, 1]),
        ({"tensor_split": "3,1"}, [0, 1]),
        ({"tensor_split": "0,1"}, [0, 1]),
        ({"split_mode": "none", "main_gpu": 1}, [1]),
    ],
    ids=["equal parts", "3 to 1", "only the second", "main GPU"],
)
def test_logits_of_divided_models_match_the_cpu(
    options: dict[str, Any], used: list[int], two_devices: tuple[str, ...]
) -> None:
    actual, device = logits_of_smollm2(gpu_layers="all", **options)
    expected_names = " and ".join(two_devices[number] for number in used)
    assert device == f"{LAYERS}/{LAYERS} layers on {expected_names}, 1 thread"
    assert_similar(actual, logits_of_smollm2(gpu_layers=0)[0])


def test_rows_cannot_be_split_over_gpus_in_this_version() -> None:
    with pytest.raises(UsageError, match="--split-mode row: device CUDA0 does not support split buffers"):
        open_llama(smollm2(), gpu_layers="all", split_mode="row")


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def measured(path: Path, **options: Any) -> Iterator[tuple[LlamaBackend, int]]:
    """Open a model and run a long prompt. Yields the backend and the bytes that it allocated on the first GPU."""
    process = LlamaProcess()
    try:
        before = free_on(process)[0]
        with open_gguf(path) as file:
            backend = LlamaBackend(file, OpenOptions(threads=1, **options), process=process)
        backend.forward(batch_of(rows(0, 0, [5] * 1000)))
        yield backend, before - free_on(process)[0]
        backend.close()
    finally:
        process.close()


def free_on(process: LlamaProcess) -> list[int]:
    return [device["free"] for device in process.ask("devices", "looking for GPUs")["devices"]]


@pytest.mark.parametrize(
    ("context_size", "gpu_layers", "kv_type"),
    [(1024, "all", "f16"), (8192, "all", "f16"), (65_536, "all", "q8_0"), (8192, 12, "f16"), (8192, 30, "f16")],
)
def test_gpu_memory_matches_the_forecast(context_size: int, gpu_layers: int | str, kv_type: str) -> None:
    """The forecast of weights and cache is within 3 %, and the forecast of compute buffers is large enough."""
    with open_gguf(smollm2()) as file:
        sizes = layer_sizes(file, context_size, kv_type)
    n_layers = LAYERS if gpu_layers == "all" else int(gpu_layers)
    [needed] = bytes_needed(sizes, [1.0], n_layers)
    stored = sum([*sizes.layers, sizes.output][LAYERS - n_layers :])
    options: dict[str, Any] = {"context_size": context_size, "gpu_layers": gpu_layers, "kv_type": kv_type}
    with measured(smollm2(), main_gpu=0, split_mode="none", **options) as (backend, taken):
        buffers = cuda_buffers(backend.log)
    held = sum(size for (_, purpose), size in buffers.items() if purpose != "compute")
    assert 0.97 * stored < held < 1.03 * stored
    assert sum(buffers.values()) < needed
    assert held < taken < needed + PROGRAM


def test_memory_of_each_device_matches_the_forecast(two_devices: tuple[str, ...]) -> None:
    with open_gguf(smollm2()) as file:
        sizes = layer_sizes(file, 4096)
    needed = bytes_needed(sizes, [3.0, 1.0], LAYERS)
    options: dict[str, Any] = {"context_size": 4096, "gpu_layers": "all", "tensor_split": "3,1"}
    with measured(smollm2(), **options) as (backend, _):
        buffers = cuda_buffers(backend.log)
    for device, of_device in (("CUDA0", needed[0]), ("CUDA1", needed[1])):
        held = sum(size for (name, purpose), size in buffers.items() if name == device and purpose != "compute")
        assert abs(held - (of_device - sizes.computing)) < 0.05 * of_device
        assert sum(size for (name, _), size in buffers.items() if name == device) < of_device


def test_auto_and_fit_choose_all_layers_where_they_fit() -> None:
    with open_gguf(smollm2()) as file:
        found = fit_of(file, Resources.of_this_machine())
    assert (found.backend, found.gpu_layers, found.layers) == ("llama", LAYERS, LAYERS)
    backend = open_llama(smollm2(), context_size=None, gpu_layers=AUTO)
    backend.close()
    assert backend.info.gpu_layers == f"{LAYERS}/{LAYERS}"
    assert backend.info.context_size == 8192  # the context that the model was trained for


def test_without_gpu_layers_the_gpu_is_not_used() -> None:
    with measured(smollm2(), context_size=1024, gpu_layers=0) as (backend, taken):
        assert cuda_buffers(backend.log) == {}
        assert abs(taken) < 16 * MIB


def test_a_cache_larger_than_the_gpu_does_not_fit(names: tuple[str, ...]) -> None:
    with open_gguf(smollm2()) as file:
        token = sum(layer_sizes(file, 1 << 20).layers) >> 20
    tokens = 2 * sum(card.memory for card in nvidia_cards()) // token
    with pytest.raises(DoesNotFit) as caught:
        open_llama(smollm2(), context_size=tokens, gpu_layers="all")
    assert "out of memory" in str(caught.value)
    assert f"free GPU memory: {names[0]} " in str(caught.value)
    assert "--gpu-layers auto" in caught.value.hint


# --- stopping and dying -----------------------------------------------------------------------------------------------


def test_a_stopped_step_leaves_the_gpu_usable() -> None:
    backend = open_llama(smollm2(), context_size=8192, gpu_layers="all")
    try:
        assert_usable_after_a_stop(backend, n_tokens=8000)
    finally:
        backend.close()


@pytest.mark.parametrize("how", ["close", "kill"])
def test_gpu_memory_is_freed(how: str) -> None:
    used_before = used()
    backend = open_llama(smollm2(), context_size=65_536, gpu_layers="all")
    backend.forward(batch_of(rows(0, 0, [5, 6, 7])))
    assert used() > used_before + backend.info.kv_bytes
    if how == "kill":
        backend._process.kill()
        with pytest.raises(BackendCrashed, match="SIGKILL"):
            backend.forward(batch_of(rows(0, 3, [8])))
    backend.close()
    end = time.monotonic() + 10
    while used() > used_before + 64 * MIB and time.monotonic() < end:
        time.sleep(0.1)
    assert used() <= used_before + 64 * MIB


def used() -> int:
    """Return the used memory of all GPUs in bytes, as reported by the driver."""
    return sum(card.memory - card.memory_free for card in nvidia_cards())


def test_another_model_opens_after_the_first(tmp_path: Path) -> None:
    """One process opens both, one after the other."""
    process = LlamaProcess()
    try:
        found = []
        for path in (smollm2(), tiny_model(tmp_path, "F32"), smollm2()):
            with open_gguf(path) as file:
                backend = LlamaBackend(file, replace(OPTIONS, gpu_layers="all"), process=process)
            found.append(backend.forward(batch_of(rows(0, 0, [5, 6, 7]))).logits)
            backend.close()
    finally:
        process.close()
    np.testing.assert_array_equal(found[0], found[2])
