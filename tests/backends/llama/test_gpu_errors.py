"""Tests of what llmrun says about GPU errors. The log lines are llama.cpp's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llmrun.backends.llama import log as log_module
from llmrun.backends.llama import probe
from llmrun.backends.llama.log import REBUILD, advice_for, gpu_error, why_no_gpu
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.registry import Gpus
from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.base.machine import gpus
from llmrun.base.machine.gpus import NvidiaCard
from tests.support.backends.fake_llama import fake_llama

OUTPUT = """\
ggml_cuda_compute_forward: MUL_MAT failed
CUDA error: {}
  current device: 0, in function ggml_cuda_compute_forward at /source/ggml/src/ggml-cuda/ggml-cuda.cu:2420
  err
/source/ggml/src/ggml-cuda/ggml-cuda.cu:109: CUDA error
"""
NO_IMAGE = "no kernel image is available for execution on the device"
TOO_OLD = "CUDA driver version is insufficient for CUDA runtime version"
H100 = NvidiaCard("NVIDIA H100", "550.1", 1, 1)


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[NvidiaCard]:
    """Return the GPUs that NVIDIA's driver reports, which a test can add to."""
    cards: list[NvidiaCard] = []
    monkeypatch.setattr(gpus, "nvidia_cards", lambda: cards)
    monkeypatch.setattr(log_module, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return cards


def test_the_cause_is_found_before_the_abort() -> None:
    assert gpu_error(OUTPUT.format(NO_IMAGE)) == (NO_IMAGE, REBUILD)
    assert gpu_error(OUTPUT.format("a") + OUTPUT.format(NO_IMAGE).replace("CUDA", "ROCm")).cause == NO_IMAGE
    assert gpu_error("ggml.c:12: GGML_ASSERT(a) failed\n") == ("", "")


def test_exceptions_of_vulkan_are_causes() -> None:
    lost = "terminate called after throwing an instance of 'vk::DeviceLostError'\n  what():  {}\n"
    cause, advice = gpu_error(lost.format("vk::Queue::submit: ErrorDeviceLost"))
    assert cause == "Vulkan: vk::Queue::submit: ErrorDeviceLost"
    assert "the kernel's log" in advice
    assert "fewer --gpu-layers" in gpu_error(lost.format("vk::Device::allocateMemory: ErrorOutOfDeviceMemory")).advice
    assert gpu_error(lost.format("std::bad_alloc")) == ("", "")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (NO_IMAGE, "is for other GPUs"),
        ("the provided PTX was compiled with an unsupported toolchain.", "is for other GPUs"),
        (TOO_OLD, "update NVIDIA's driver"),
        ("system has unsupported display driver / cuda driver combination", "update NVIDIA's driver"),
        ("out of memory", "fewer --gpu-layers"),
        ("all CUDA-capable devices are busy or unavailable", "which program uses the GPU"),
        ("unspecified launch failure", "Xid"),
        ("an illegal memory access was encountered", "Xid"),
        ("uncorrectable ECC error encountered", "Xid"),
        ("libcuda.so.1: cannot open shared object file", "install NVIDIA's driver"),
        ("libcublas.so.13: cannot open shared object file", "install cuBLAS"),
        ("std::bad_alloc: out of main memory", ""),
        ("libllama.so: cannot open shared object file", ""),
    ],
)
def test_each_error_has_its_advice(cause: str, words: str) -> None:
    assert words in advice_for(cause)
    assert bool(words) == bool(advice_for(cause))


@pytest.mark.push
@pytest.mark.parametrize(
    ("cause", "hint"), [(NO_IMAGE, REBUILD), ("out of memory", advice_for("out of memory")), ("?", "--backend cpu")]
)
def test_a_gpu_that_fails_is_explained(cause: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's process logs the cause and aborts, as ggml does."""
    code = f"import os, sys\nsys.stderr.write({OUTPUT.format(cause)!r})\nsys.stderr.flush()\nos.abort()\n"
    monkeypatch.syspath_prepend(fake_llama(tmp_path, when_imported=code))
    process = LlamaProcess()
    try:
        with pytest.raises(BackendCrashed) as caught:
            process.ask("devices", "looking for GPUs")
    finally:
        process.close()
    assert str(caught.value) == f"llama.cpp died while looking for GPUs: SIGABRT: {cause}"
    assert hint in caught.value.hint


@pytest.mark.push
def test_a_missing_cuda_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise OSError('libcublas.so.13: cannot open shared object file')"
    monkeypatch.syspath_prepend(fake_llama(tmp_path, when_imported=code))
    process = LlamaProcess()
    try:
        with pytest.raises(LlmrunError, match=r"does not work: OSError: libcublas\.so\.13") as caught:
            process.ask("devices", "looking for GPUs")
    finally:
        process.close()
    assert caught.value.hint.startswith("install cuBLAS")


def test_a_driver_that_is_too_old_is_the_reason(drivers: list[NvidiaCard]) -> None:
    log = f"a line\nggml_cuda_init: failed to initialize CUDA: {TOO_OLD}\n"
    assert why_no_gpu(log) == ("", "")  # CUDA says so, too, where there is no driver
    drivers.append(H100)
    assert why_no_gpu(log).cause == TOO_OLD


def test_a_driver_that_does_not_answer_is_a_driver(drivers: list[NvidiaCard], tmp_path: Path) -> None:
    """After a driver update, the library does not match the kernel module until the machine restarts."""
    (tmp_path / "version").write_text("NVRM version")
    log = "ggml_cuda_init: failed to initialize CUDA: unknown error"
    assert why_no_gpu(log).cause == "unknown error"


@pytest.mark.parametrize(("value", "has_driver"), [("", False), ("-1", False), ("7", True)])
def test_variables_that_hide_the_gpus_are_named(
    value: str, has_driver: bool, drivers: list[NvidiaCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers += [H100] * has_driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    log = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"
    cause = f"the variable CUDA_VISIBLE_DEVICES is '{value}'"
    assert why_no_gpu(log) == (cause, "unset the variable to use the GPU")


@pytest.mark.parametrize(
    ("starts", "variable", "expected", "advice"),
    [
        (True, None, "Vulkan's drivers found no GPU", "group render"),
        (False, None, "Vulkan has no driver", "install a Vulkan driver"),
        (True, "", "the variable GGML_VK_VISIBLE_DEVICES is ''", "unset the variable"),
        (
            False,
            "7",
            "Vulkan has no driver for these devices: the variable GGML_VK_VISIBLE_DEVICES is '7'",
            "--summary",
        ),
        (None, "7", "", ""),
    ],
)
def test_vulkan_without_a_gpu_is_explained(
    starts: bool | None,
    variable: str | None,
    expected: str,
    advice: str,
    drivers: list[NvidiaCard],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", variable)
    found = why_no_gpu("", starts)
    assert found.cause == expected
    assert advice in found.advice


def test_without_a_driver_the_variable_is_no_reason(drivers: list[NvidiaCard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert why_no_gpu("") == ("", "")


def test_the_reason_reaches_the_user_and_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may fail only until its driver is updated or, after a laptop has slept, until the driver is loaded again."""
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    answer = {"offloads": True, "devices": [], "why_none": "unknown error", "advice": ""}
    monkeypatch.setattr(probe, "_devices", lambda: answer)
    assert probe.gpus() == Gpus((), "llama.cpp found no GPU: unknown error")
    answer |= {"devices": [{"description": "NVIDIA H100"}], "why_none": ""}
    assert probe.gpus() == Gpus((), "llama.cpp found no GPU: unknown error")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert probe.gpus() == Gpus(("NVIDIA H100",))
