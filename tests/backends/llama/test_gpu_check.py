"""Tests that a llama.cpp build that does not work on this machine is detected, with the operation that killed it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llmrun.backends.llama import gpu_check, probe
from llmrun.backends.llama.gpu_check import VOCABULARY, LlamaTrial, trial_model, try_llama
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import LlmrunError
from tests.support.backends.fake_llama import DIES, HANGS, fake_llama
from tests.support.gguf.gguf_memory import read_gguf


def tried(**options: float) -> LlamaTrial:
    trial = try_llama(**options)
    assert trial is not None
    return trial


@pytest.mark.push
def test_the_build_of_the_tests_multiplies() -> None:
    trial = tried()
    assert (trial.failure, trial.crashed, trial.gpus) == ("", False, ())
    assert trial.version
    assert "CPU" in trial.system
    assert trial.rpc == llama_cpp.llama_supports_rpc()


def test_the_model_is_one_that_the_strict_reader_takes_with_matrices_that_every_kernel_takes() -> None:
    file = read_gguf(trial_model(), Path("trial.gguf"))
    assert file.integer("llama.vocab_size") == VOCABULARY
    matrices = [tensor for tensor in file.tensors.values() if tensor.type.name == "Q8_0"]
    assert len(matrices) == 9
    for tensor in matrices:  # as AMX needs: rows in whole tiles of 32, blocks of 32 weights
        assert tensor.shape[0] % 32 == tensor.shape[1] % 32 == 0
        assert tensor.type.dequantize is not None
        values = tensor.type.dequantize(file.read(tensor).reshape(tensor.n_rows, -1))
        assert 0 < np.abs(values).max() < 1


@pytest.mark.push
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGABRT", "SIGFPE"])
def test_a_build_that_dies_at_the_first_product_is_named_with_its_signal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_llama(tmp_path, when_decoding=DIES.format(name)))
    trial = tried()
    assert trial.failure == f"llama.cpp died while multiplying: {name}"
    assert trial.crashed
    assert "CPU" in trial.system  # details found before the crash


def test_a_build_that_dies_when_it_is_loaded_is_named_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_llama(tmp_path, when_imported=DIES.format("SIGILL")))
    assert tried().failure == "llama.cpp died while starting: SIGILL"


@pytest.mark.night
@pytest.mark.parametrize(("where", "doing"), [("when_imported", "starting"), ("when_decoding", "multiplying")])
def test_a_build_that_hangs_is_given_up(
    where: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_llama(tmp_path, **{where: HANGS}))
    trial = tried(patience=1.5)
    assert trial.failure == f"llama.cpp did not answer within 1.5 s while {doing}"
    assert trial.crashed


def test_a_build_that_cannot_be_loaded_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(fake_llama(tmp_path, when_imported="raise OSError('libllama.so: not there')"))
    trial = tried()
    assert trial.failure == "llama-cpp-python does not work: OSError: libllama.so: not there"
    assert not trial.crashed


@pytest.mark.push
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("def llama_decode(*arguments):\n    return -3", "llama.cpp failed while multiplying: status -3"),
        (
            "def llama_get_logits(context):\n    return (ctypes.c_float * 64)(*[float('nan')] * 64)",
            "llama.cpp failed while multiplying: the results are invalid",
        ),
        (
            "def llama_get_logits(context):\n    return (ctypes.c_float * 64)()",
            "llama.cpp failed while multiplying: the results are invalid",
        ),
        (
            "def llama_model_load_from_file(*arguments):\n    return None",
            "llama.cpp cannot load a test model: no reason given",
        ),
    ],
)
def test_a_build_that_answers_nonsense_does_not_work(
    more: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_llama(tmp_path, more=more))
    trial = tried()
    assert trial.failure == words
    assert not trial.crashed


@pytest.mark.push
def test_gpus_multiply_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build has no GPU, so layers assigned to a GPU run on the CPU. The GPU may take three times as long."""
    limits: list[float] = []
    start_timer = threading.Timer.start

    def noted(timer: threading.Timer) -> None:
        limits.append(timer.interval)
        start_timer(timer)

    monkeypatch.setattr(threading.Timer, "start", noted)
    asked: list[int] = []
    answer_of = gpu_check._answer

    def answered(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        answer = answer_of(process, operation, doing, **fields)
        if operation == "describe":
            return answer | {"offloads": True, "devices": [{"description": "GPU 0", "free": 1, "total": 2}]}
        if operation == "open":
            asked.append(fields["gpu_layers"])
        return answer

    monkeypatch.setattr(gpu_check, "_answer", answered)
    trial = tried(patience=20)
    assert trial.failure == ""
    assert limits == [20, 60]
    assert [gpu["description"] for gpu in trial.gpus] == ["GPU 0"]
    assert asked == [0, -1]


def test_what_is_not_installed_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_package", lambda: None)
    assert try_llama() is None


def test_a_system_that_starts_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> LlamaProcess:
        raise LlmrunError("cannot start a process for llama.cpp: python: Resource temporarily unavailable")

    monkeypatch.setattr(gpu_check, "LlamaProcess", refuse)
    trial = tried()
    assert "Resource temporarily unavailable" in trial.failure
    assert not trial.crashed
