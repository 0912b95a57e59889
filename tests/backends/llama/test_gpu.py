"""Tests of llama.cpp on a real NVIDIA GPU. scripts/test_gpu runs them.

llama.cpp can present one GPU as two devices, so dividing layers is tested on machines with one GPU, too.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import AUTO
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.llama import probe
from llmrun.backends.llama.placement import ALL_LAYERS, layer_sizes
from llmrun.backends.registry import Gpus
from llmrun.base.errors import BackendCrashed, DoesNotFit
from llmrun.base.machine.gpus import gpus, nvidia_cards
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import ProjectorFile
from tests.support.backends.gpu_contract import (
    LAYERS,
    MIB,
    PROGRAM,
    GpuEngine,
    GpuLogits,
    GpuMemory,
    GpuProcess,
    GpuSeam,
    GpuSeamOfARecurrentModel,
)
from tests.support.backends.offloading import open_llama
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.downloads import smollm2
from tests.support.vision.opened import encoded, open_vision, vision_of

pytestmark = pytest.mark.gpu


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
    assert probe.gpus() == Gpus((), "llama.cpp found no GPU: the variable CUDA_VISIBLE_DEVICES is ''")


# --- images -----------------------------------------------------------------------------------------------------------


def constant(value: int) -> property:
    return property(lambda projector: value)


def test_images_are_encoded_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for needed, layers, on_gpu in [(0, ALL_LAYERS, True), (1 << 50, ALL_LAYERS, False), (0, 0, False)]:
        monkeypatch.setattr(ProjectorFile, "memory_bytes", constant(needed))
        backend = open_vision(tmp_path, "gemma3", gpu_layers=layers)
        assert vision_of(backend).on_gpu == on_gpu
        rows.append(encoded(backend, vision_of(backend).projector.layout(300, 200)).rows)
        backend.close()
    np.testing.assert_array_equal(rows[1], rows[2])
    np.testing.assert_allclose(rows[0], rows[2], rtol=0, atol=0.02 * float(np.ptp(rows[2])))


# --- the tests of all GPUs --------------------------------------------------------------------------------------------


class TestSeam(GpuSeam):
    pass


class TestSeamOfARecurrentModel(GpuSeamOfARecurrentModel):
    pass


class TestEngine(GpuEngine):
    pass


class TestLogits(GpuLogits):
    api = "CUDA"


class TestMemory(GpuMemory):
    api = "CUDA"


class TestProcess(GpuProcess):
    pass


# --- memory -----------------------------------------------------------------------------------------------------------


def test_auto_and_fit_choose_all_layers_where_they_fit() -> None:
    with open_gguf(smollm2()) as file:
        found = fit_of(file, Resources.of_this_machine())
    assert (found.backend, found.gpu_layers, found.layers) == ("llama", LAYERS, LAYERS)
    backend = open_llama(smollm2(), context_size=None, gpu_layers=AUTO)
    backend.close()
    assert backend.info.gpu_layers == f"{LAYERS}/{LAYERS}"
    assert backend.info.context_size == 8192  # the context that the model was trained for


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
