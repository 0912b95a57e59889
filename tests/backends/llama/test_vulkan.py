"""Tests of llama.cpp with Vulkan, on lavapipe, a software driver. scripts/test_vulkan runs them.

lavapipe is a device with memory and queues, and layers are offloaded to it as to a GPU. llama.cpp presents it as two
devices if its number is named twice.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("needs Linux's Mesa", allow_module_level=True)

from llmrun.backends.base import AUTO, OpenOptions
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.llama import placement, probe
from llmrun.backends.registry import Gpus, NoRoomOnGpu, open_backend
from llmrun.base.errors import BackendCrashed, UsageError
from llmrun.base.types import HIDDEN, LOGITS
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.gpu_contract import (
    GpuEngine,
    GpuLogits,
    GpuMemory,
    GpuProcess,
    GpuSeam,
    GpuSeamOfARecurrentModel,
)
from tests.support.backends.offloading import PROMPT, assert_agree, assert_similar, open_llama
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2
from tests.support.models.embedding_results import cosines, random_texts, results
from tests.support.models.llama_cpp_oracle import requantize
from tests.support.models.tiny_adapters import scales_of, tiny_adapter
from tests.support.models.tiny_encoders import LLAMA_ENCODERS, TINY_ENCODERS, TINY_RERANKERS, tiny_encoder
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.vulkan

VISIBLE = "GGML_VK_VISIBLE_DEVICES"
DRIVERS = "VK_DRIVER_FILES"
BLOCK_TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS")


@pytest.fixture(scope="module", autouse=True)
def names() -> tuple[str, ...]:
    """Return the name of the device, which must be lavapipe."""
    found = probe.gpus()
    assert found.are_software, f"{found.reason or found.names}; run scripts/test_vulkan"
    return found.names


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Present the device as two, and return their names."""
    monkeypatch.setenv(VISIBLE, "0,0")
    found = probe.gpus().names
    assert len(found) == 2
    return found


# --- the tests of all GPUs --------------------------------------------------------------------------------------------


class TestSeam(GpuSeam):
    pass


class TestSeamOfARecurrentModel(GpuSeamOfARecurrentModel):
    pass


class TestEngine(GpuEngine):
    pass


class TestLogits(GpuLogits):
    api = "Vulkan"


class TestMemory(GpuMemory):
    api = "Vulkan"
    reports_usage = False  # lavapipe's memory is that of the machine
    n_tokens = 3


class TestProcess(GpuProcess):
    pass


# --- detection --------------------------------------------------------------------------------------------------------


def test_the_device_is_listed_with_its_memory(names: tuple[str, ...]) -> None:
    [device] = probe.usable_gpus()
    assert device["description"] == names[0]
    assert 0 < device["free"] <= device["total"]
    assert device["total"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({VISIBLE: ""}, f"the variable {VISIBLE} is ''"),
        ({VISIBLE: "7"}, f"Vulkan has no driver for these devices: the variable {VISIBLE} is '7'"),
        ({DRIVERS: "/none.json"}, f"Vulkan has no driver for these devices: the variable {VISIBLE} is '0'"),
        ({DRIVERS: "/none.json", VISIBLE: None}, "Vulkan has no driver"),
        ({VISIBLE: None}, "Vulkan's drivers found no GPU"),
    ],
    ids=["hidden", "no such device", "no driver", "no driver and no number", "software alone"],
)
def test_devices_that_vanish_are_explained(
    variables: dict[str, str | None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert probe.gpus() == Gpus((), f"llama.cpp found no GPU: {reason}")
    opened = open_backend(smollm2(), OpenOptions("llama", context_size=64, threads=1, gpu_layers="all"))
    opened.close()
    assert (opened.info.device, opened.info.gpu_layers) == ("1 thread", "")


# --- logits, hidden states and vectors --------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_type", ["F16", "Q8_0", "Q4_0"])
def test_smollm2_matches_the_cpu_in_other_types(weight_type: str, tmp_path: Path) -> None:
    assert_similar(*on_both(requantize(smollm2(), tmp_path / "model.gguf", weight_type), PROMPT))


@pytest.mark.parametrize("weight_type", BLOCK_TYPES)
def test_other_weight_types_match_the_cpu(weight_type: str, tmp_path: Path) -> None:
    plain = tiny_llama(tmp_path / "plain.gguf", weight_type="F32", width=256, feed_forward=512)
    assert_similar(*on_both(requantize(plain, tmp_path / "model.gguf", weight_type), list(range(5, 85))))


def on_both(path: Path, tokens: list[int]) -> list[np.ndarray]:
    """Return the logits of layers on the device and of layers on the CPU."""
    found = []
    for layers in ("all", 0):
        backend = open_llama(path, gpu_layers=layers, context_size=512)
        prompt = backend.forward(batch_of(rows(0, 0, tokens[:-1]))).logits
        found.append(np.concatenate([prompt, backend.forward(batch_of(rows(0, len(tokens) - 1, tokens[-1:]))).logits]))
        backend.close()
    return found


def test_hidden_states_match_the_cpu(tmp_path: Path) -> None:
    path, batch = tiny_model(tmp_path, "F32"), batch_of(rows(0, 0, list(range(5, 45))))
    found = []
    for layers in ("all", 0):
        backend = open_llama(path, gpu_layers=layers)
        outputs = backend.forward(replace(batch, want=np.full(40, HIDDEN | LOGITS, np.uint8)))
        found.append((outputs.logits, outputs.hidden / np.linalg.norm(outputs.hidden, axis=1, keepdims=True)))
        backend.close()
    (logits, states), (expected_logits, expected_states) = found
    assert cosines(states, expected_states).min() > 0.9999
    assert_agree(logits, expected_logits)


@pytest.mark.parametrize("name", ["bert", "modern-bert", "gemma-embedding"])
def test_vectors_of_encoders_match_the_cpu(name: str, tmp_path: Path) -> None:
    path, texts = tiny_encoder(tmp_path, (TINY_ENCODERS | LLAMA_ENCODERS)[name]), random_texts(12, random.Random(1))
    on_the_device = results(path, texts, backend="llama", gpu_layers="all")
    assert cosines(on_the_device, np.array(results(path, texts, backend="llama"))).min() > 0.9999


def test_scores_of_rerankers_match_the_cpu(tmp_path: Path) -> None:
    """The tolerance is twice that of logits, because the range of 12 scores is smaller than that of a row of logits."""
    path, texts = tiny_encoder(tmp_path, TINY_RERANKERS["bert"]), random_texts(12, random.Random(2))
    expected = np.concatenate(results(path, texts, backend="llama"))
    scores = np.concatenate(results(path, texts, backend="llama", gpu_layers="all"))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=0.01 * float(np.ptp(expected)))


def test_adapters_are_applied_on_the_device(tmp_path: Path) -> None:
    """Each model gets one batch: lavapipe's heap is corrupted by batches with and without adapters in turn."""
    model = tiny_model(tmp_path, "F32")
    adapters = [str(tiny_adapter(tmp_path / f"{n}.gguf", model, rank=n + 3, seed=n)) for n in range(2)]
    batch = batch_of(rows(0, 0, list(range(5, 45))))

    def logits(layers: int | str, *scales: float) -> np.ndarray:
        backend = open_llama(model, gpu_layers=layers, adapters=adapters)
        try:
            return backend.forward(replace(batch, scales=scales_of(40, *scales))).logits
        finally:
            backend.close()

    assert_agree(logits("all", 0.5, 1.0), logits(0, 0.5, 1.0))
    assert_agree(logits("all", 0.0, 0.0), logits(0, 0.0, 0.0))
    with pytest.raises(AssertionError):
        assert_agree(logits("all", 0.5, 1.0), logits("all", 0.0, 0.0))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_auto_layers_use_the_device_if_llama_is_named(names: tuple[str, ...]) -> None:
    backend = open_llama(smollm2(), context_size=None, gpu_layers=AUTO)
    backend.close()
    assert backend.info.device == f"31/31 layers on {names[0]}, 1 thread"
    assert backend.info.context_size == 8192  # the context that the model was trained for


def test_auto_and_fit_leave_the_device_alone() -> None:
    with open_gguf(smollm2()) as file:
        found = fit_of(file, Resources.of_this_machine())
    assert (found.backend, found.gpu_layers, found.layers) == ("cpu", 0, 0)
    reasons: list[str] = []
    backend = open_backend(smollm2(), OpenOptions(context_size=64, threads=1, explain=reasons.append))
    backend.close()
    assert backend.info.backend == "cpu"
    assert reasons == [f"auto chose cpu: {probe.gpus().names[0]} is not a GPU but a software driver"]


def test_where_no_layer_fits_auto_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MARGIN", 1 << 60)  # as if other programs needed the memory
    with pytest.raises(NoRoomOnGpu, match=r"no layer fits in the free GPU memory: llvmpipe \(.*\): [\d,]+ MiB$"):
        open_llama(smollm2(), gpu_layers=AUTO)


def test_a_split_for_more_devices_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"--tensor-split: 2 numbers for 1 device: llvmpipe"):
        open_llama(smollm2(), gpu_layers="all", tensor_split="1,1")
    with pytest.raises(UsageError, match=r"--main-gpu: 1 is not one of llama.cpp's devices"):
        open_llama(smollm2(), gpu_layers="all", split_mode="none", main_gpu=1)


# --- dying ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_dies_in_a_step_is_reported(number: signal.Signals) -> None:
    backend = open_llama(smollm2(), context_size=1024, gpu_layers="all")
    try:
        timer = threading.Timer(0.3, os.kill, [backend._process.pid, number])
        timer.start()
        with pytest.raises(BackendCrashed, match=f"llama.cpp died while running {smollm2()}: {number.name}$"):
            backend.forward(batch_of(rows(0, 0, PROMPT * 7)))
        timer.join()
    finally:
        backend.close()
