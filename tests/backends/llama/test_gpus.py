"""Tests of layers on a GPU: the request to llama.cpp, what it reports, and the message when they do not fit.

The tests need no GPU: they make up what llama.cpp's process reports about GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.base import AUTO, OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.placement import ALL_LAYERS
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.registry import NoRoomOnGpu
from llmrun.base.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_gpus import GIB, pretend_answers, pretend_gpus
from tests.support.backends.fake_llama import fake_llama
from tests.support.gguf.gguf_files import tiny_llama

pytestmark = pytest.mark.push

# llama.cpp's own log lines, for two GPUs and for one.
TWO_GPUS = (
    "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA H200) (0000:01:00.0) - 143156 MiB free",
    "llama_model_load_from_file_impl: using device Vulkan1 (AMD Radeon (TM) (RADV)) (unknown id) - 512 MiB free",
    "load_tensors: offloaded 3/3 layers to GPU",
)
REFUSAL = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5000.00 MiB on device 0: cudaMalloc failed: out of memory"
)


OPTIONS = OpenOptions(context_size=64, threads=1, gpu_layers=0)


def opened(path: Path, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the numbers of layers that llama.cpp was asked to offload."""
    numbers: list[int] = []
    tell = LlamaProcess.tell

    def noted(process: LlamaProcess, operation: str, **fields: Any) -> int:
        if operation == "open":
            numbers.append(fields["gpu_layers"])
        return tell(process, operation, **fields)

    monkeypatch.setattr(LlamaProcess, "tell", noted)
    return numbers


def test_as_many_layers_as_fit_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    pretend_gpus(monkeypatch, 2 * GIB)
    opened(path, gpu_layers=AUTO).close()
    opened(path, gpu_layers="all").close()
    opened(path, gpu_layers=7).close()
    assert asked == [3, ALL_LAYERS, 7]  # two layers and the output layer


def test_where_none_fits_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    pretend_gpus(monkeypatch, GIB, GIB // 2)
    with pytest.raises(NoRoomOnGpu, match="no layer fits in the free GPU memory: GPU 0: 1,024 MiB, GPU 1: 512 MiB"):
        opened(tiny_llama(tmp_path / "tiny.gguf"), gpu_layers=AUTO)
    assert asked == []


def test_the_placement_is_told_in_llama_cpps_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    pretend_answers(monkeypatch, log=TWO_GPUS)
    backend = opened(path, gpu_layers="all")
    backend.close()
    assert backend.info.device == "3/3 layers on NVIDIA H200 and AMD Radeon (TM) (RADV), 1 thread"
    assert backend.info.gpu_layers == "3/3"


def test_a_build_with_gpus_that_are_not_used_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    pretend_answers(monkeypatch, log=["load_tensors: offloaded 0/3 layers to GPU"])
    backend = opened(path, gpu_layers=0)
    backend.close()
    assert (backend.info.device, backend.info.gpu_layers) == ("1 thread", "")


def test_too_many_layers_do_not_fit_and_auto_is_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    pretend_answers(monkeypatch, failed=REFUSAL, log=TWO_GPUS)
    with pytest.raises(DoesNotFit) as caught:
        opened(path, gpu_layers="all")
    assert caught.value.exit_code == 7
    said = str(caught.value)
    assert "allocating 5000.00 MiB" in said
    assert said.endswith("; free GPU memory: NVIDIA H200 143,156 MiB, AMD Radeon (TM) (RADV) 512 MiB")
    assert "--gpu-layers auto" in caught.value.hint


def test_without_a_gpu_the_hint_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    pretend_answers(monkeypatch, failed="failed to allocate buffer for kv cache")
    with pytest.raises(DoesNotFit) as caught:
        opened(path)
    assert "gpu" not in caught.value.hint


def test_the_split_is_part_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []
    tell = LlamaProcess.tell

    def noted(process: LlamaProcess, operation: str, **fields: Any) -> int:
        requests.append(fields)
        return tell(process, operation, **fields)

    monkeypatch.setattr(LlamaProcess, "tell", noted)
    pretend_gpus(monkeypatch, 9 * GIB, 9 * GIB)
    path = tiny_llama(tmp_path / "tiny.gguf")
    opened(path, gpu_layers="all", tensor_split="3,1", split_mode="row").close()
    opened(path, gpu_layers="all", split_mode="none", main_gpu=1).close()
    opened(path, gpu_layers="all").close()
    asked = [
        (fields["tensor_split"], fields["split_mode"], fields["main_gpu"])
        for fields in requests
        if "tensor_split" in fields
    ]
    assert asked == [((3.0, 1.0), "row", 0), ((), "none", 1), ((), "layer", 0)]


SHOW_PARAMETERS = """
def llama_model_load_from_file(path, parameters):
    split = parameters.tensor_split[:llama_max_devices()] if parameters.tensor_split else None
    raise RuntimeError(f"{parameters.split_mode} {parameters.main_gpu} {split}")
"""


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, "1 0 None"),
        ({"tensor_split": "3,1"}, f"1 0 {[3.0, 1.0, *[0.0] * 14]}"),
        ({"tensor_split": "3,1", "split_mode": "row"}, f"2 0 {[3.0, 1.0, *[0.0] * 14]}"),
        ({"split_mode": "none", "main_gpu": 1}, "0 1 None"),
    ],
)
def test_llama_cpp_gets_the_split_in_its_own_structure(
    options: dict[str, Any], parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker loads a fake library, which reports the parameters of the model."""
    pretend_gpus(monkeypatch, 9 * GIB, 9 * GIB)
    monkeypatch.syspath_prepend(fake_llama(tmp_path / "fake", more=SHOW_PARAMETERS))
    with pytest.raises(LlmrunError) as caught:
        opened(tiny_llama(tmp_path / "tiny.gguf"), gpu_layers="all", **options)
    assert str(caught.value) == f"llama-cpp-python does not work: RuntimeError: {parameters}"


def test_devices_that_cannot_split_rows_are_told_by_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_answers(monkeypatch, failed="llama_model_load: device RPC0 does not support split buffers")
    with pytest.raises(UsageError) as caught:
        opened(tiny_llama(tmp_path / "tiny.gguf"))
    assert str(caught.value) == "--split-mode row: device RPC0 does not support split buffers"
    assert "--split-mode layer" in caught.value.hint
