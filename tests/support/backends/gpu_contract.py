"""The tests of layers on a GPU, for each API through which llama.cpp uses GPUs.

Each API's test file subclasses these classes. It has the fixture `names`, which returns the names of the devices, and
`two_devices`, which presents one device as two and returns their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import AUTO, Backend, OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.gpu_check import try_llama
from llmrun.backends.llama.placement import bytes_needed, layer_sizes
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import UsageError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_gpus import GIB
from tests.support.backends.offloading import (
    OPTIONS,
    assert_agree,
    assert_similar,
    assert_usable_after_a_stop,
    gpu_buffers,
    logits_of_smollm2,
    open_llama,
)
from tests.support.backends.recurrent import tiny_recurrent
from tests.support.backends.seam_contract import FullCacheContract, SeamContract, batch_of, rows
from tests.support.engine.contract import CancelContract, PrefixContract
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import TINY_MODELS, tiny_model

MIB = 1 << 20
LAYERS = 31  # of SmolLM2, including the output layer
PROGRAM = GIB  # upper bound of CUDA's own memory (kernels, handles and workspaces), which `auto` leaves free


class GpuSeam(SeamContract, FullCacheContract):
    """The contract of backends for a model whose layers are all on a GPU."""

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


class GpuSeamOfARecurrentModel(SeamContract):
    """The contract of backends for a model with a recurrent state."""

    exact = False
    goes_back = False

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.path = tiny_recurrent(tmp_path / "tiny.gguf", width=64, state=16)

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return on_the_gpu(
            open_llama(self.path, context_size=context_size, max_sequences=max_sequences, gpu_layers="all")
        )


class GpuEngine(PrefixContract, CancelContract):
    """The contract of the engine for a model whose layers are all on a GPU."""

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
    assert any(purpose == "model" for _, purpose in gpu_buffers(backend.log))
    return backend


class GpuLogits:
    """Tests of logits of layers on GPUs, compared with those of llama.cpp on the CPU.

    api  llama.cpp's name for the API, as in the name of the device CUDA0
    """

    api = ""

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
    def test_logits_match_the_cpu(self, options: dict[str, Any], placed: int, names: tuple[str, ...]) -> None:
        actual, device = logits_of_smollm2(**options)
        expected, on_the_cpu = logits_of_smollm2(gpu_layers=0, kv_type=options.get("kv_type", "f16"))
        assert (device, on_the_cpu) == (f"{placed}/{LAYERS} layers on {' and '.join(names)}, 1 thread", "1 thread")
        assert_similar(actual, expected)

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_logits_of_all_weight_types_match_the_cpu(self, name: str, tmp_path: Path) -> None:
        path = tiny_model(tmp_path, name)
        batches = [batch_of(rows(0, 0, list(range(5, 85)))), batch_of(rows(0, 80, [85]))]
        found = []
        for gpu_layers in ("all", 0):
            backend = open_llama(path, gpu_layers=gpu_layers)
            found.append(np.concatenate([backend.forward(batch).logits for batch in batches]))
            backend.close()
        (assert_similar if "Q" in name else assert_agree)(*found)

    def test_logits_of_a_recurrent_model_match_the_cpu(self, tmp_path: Path) -> None:
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
        self, options: dict[str, Any], used: list[int], two_devices: tuple[str, ...]
    ) -> None:
        actual, device = logits_of_smollm2(gpu_layers="all", **options)
        expected_names = " and ".join(two_devices[number] for number in used)
        assert device == f"{LAYERS}/{LAYERS} layers on {expected_names}, 1 thread"
        assert_similar(actual, logits_of_smollm2(gpu_layers=0)[0])

    def test_rows_cannot_be_split_over_gpus_in_this_version(self) -> None:
        with pytest.raises(UsageError, match=f"--split-mode row: device {self.api}0 does not support split buffers"):
            open_llama(smollm2(), gpu_layers="all", split_mode="row")


class GpuMemory:
    """Tests of the memory that llama.cpp allocates on GPUs, compared with the forecast.

    api            llama.cpp's name for the API, as in the name of the device CUDA0
    reports_usage  whether the driver's free memory is that of the device alone
    n_tokens       length of the prompt, which makes the driver allocate its own memory
    """

    api = ""
    reports_usage = True
    n_tokens = 1000

    @pytest.mark.parametrize(
        ("context_size", "gpu_layers", "kv_type"),
        [(1024, "all", "f16"), (8192, "all", "f16"), (65_536, "all", "q8_0"), (8192, 12, "f16"), (8192, 30, "f16")],
    )
    def test_gpu_memory_matches_the_forecast(self, context_size: int, gpu_layers: int | str, kv_type: str) -> None:
        """The forecast of weights and cache is within 3 %, and the forecast of compute buffers is large enough."""
        with open_gguf(smollm2()) as file:
            sizes = layer_sizes(file, context_size, kv_type)
        n_layers = LAYERS if gpu_layers == "all" else int(gpu_layers)
        [needed] = bytes_needed(sizes, [1.0], n_layers)
        stored = sum([*sizes.layers, sizes.output][LAYERS - n_layers :])
        options: dict[str, Any] = {"context_size": context_size, "gpu_layers": gpu_layers, "kv_type": kv_type}
        with measured(smollm2(), self.n_tokens, main_gpu=0, split_mode="none", **options) as (backend, taken):
            buffers = gpu_buffers(backend.log)
        held = sum(size for (_, purpose), size in buffers.items() if purpose != "compute")
        assert 0.97 * stored < held < 1.03 * stored
        assert sum(buffers.values()) < needed
        if self.reports_usage:
            assert held < taken < needed + PROGRAM

    def test_memory_of_each_device_matches_the_forecast(self, two_devices: tuple[str, ...]) -> None:
        with open_gguf(smollm2()) as file:
            sizes = layer_sizes(file, 4096)
        needed = bytes_needed(sizes, [3.0, 1.0], LAYERS)
        options: dict[str, Any] = {"context_size": 4096, "gpu_layers": "all", "tensor_split": "3,1"}
        with measured(smollm2(), self.n_tokens, **options) as (backend, _):
            buffers = gpu_buffers(backend.log)
        for device, of_device in ((f"{self.api}0", needed[0]), (f"{self.api}1", needed[1])):
            held = sum(size for (name, purpose), size in buffers.items() if name == device and purpose != "compute")
            assert abs(held - (of_device - sizes.computing)) < 0.05 * of_device
            assert sum(size for (name, _), size in buffers.items() if name == device) < of_device

    def test_without_gpu_layers_the_gpu_is_not_used(self) -> None:
        with measured(smollm2(), self.n_tokens, context_size=1024, gpu_layers=0) as (backend, taken):
            assert gpu_buffers(backend.log) == {}
            if self.reports_usage:
                assert abs(taken) < 16 * MIB


@contextmanager
def measured(path: Path, n_tokens: int, **options: Any) -> Iterator[tuple[LlamaBackend, int]]:
    """Open a model and run a prompt. Yields the backend and the bytes that it allocated on the first GPU."""
    process = LlamaProcess()
    try:
        before = free_on(process)[0]
        with open_gguf(path) as file:
            backend = LlamaBackend(file, OpenOptions(threads=1, **options), process=process)
        backend.forward(batch_of(rows(0, 0, [5] * n_tokens)))
        yield backend, before - free_on(process)[0]
        backend.close()
    finally:
        process.close()


def free_on(process: LlamaProcess) -> list[int]:
    return [device["free"] for device in process.ask("devices", "looking for GPUs")["devices"]]


class GpuProcess:
    """Tests of llama.cpp's process with layers on GPUs."""

    def test_the_trial_multiplies_on_the_gpu(self, names: tuple[str, ...]) -> None:
        trial = try_llama()
        assert trial is not None
        assert (trial.failure, trial.offloads) == ("", True)
        assert tuple(gpu["description"] for gpu in trial.gpus) == names

    def test_a_stopped_step_leaves_the_gpu_usable(self) -> None:
        backend = open_llama(smollm2(), context_size=8192, gpu_layers="all")
        try:
            assert_usable_after_a_stop(backend, n_tokens=8000)
        finally:
            backend.close()

    def test_another_model_opens_after_the_first(self, tmp_path: Path) -> None:
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
