"""Tests of the devices that get layers, of options that do not match the devices, and of layers on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmrun.backends.base import AUTO, OpenOptions
from llmrun.backends.llama import placement as module
from llmrun.backends.llama.placement import (
    ALL_LAYERS,
    Placement,
    cache_by_context,
    decide_placement,
    footprint_on_llama,
    layer_sizes,
    rows_at_once,
    used_devices,
)
from llmrun.backends.llama.state_checkpoints import n_checkpoints
from llmrun.backends.sizing import GPU_CONTEXT, LARGEST_DEFAULT, LLAMA_PROCESS, KVBytes
from llmrun.base.errors import DoesNotFit, UsageError
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import ProjectorFile
from tests.support.backends.fake_gpus import GIB
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.tiny_architectures import tiny_architecture

DEVICES = [{"description": name, "free": 1, "total": 2} for name in ("10.0.0.2:50052", "NVIDIA H200", "NVIDIA L4")]
NAMES = "10.0.0.2:50052, NVIDIA H200, NVIDIA L4"


def placement(**options: Any) -> OpenOptions:
    return OpenOptions(context_size=512, **options)


@pytest.mark.parametrize("options", [{}, {"tensor_split": "3,0,1"}, {"split_mode": "row"}])
def test_all_devices_are_used(options: dict[str, Any]) -> None:
    assert used_devices(placement(**options), DEVICES) == DEVICES


@pytest.mark.parametrize("number", [0, 1, 2])
def test_without_a_split_one_device_is_used(number: int) -> None:
    assert used_devices(placement(split_mode="none", main_gpu=number), DEVICES) == [DEVICES[number]]


@pytest.mark.parametrize(("split", "numbers"), [("1", "1 number"), ("1,1", "2 numbers"), ("1,1,1,1", "4 numbers")])
def test_a_split_for_other_devices_is_refused(split: str, numbers: str) -> None:
    with pytest.raises(UsageError) as caught:
        used_devices(placement(tensor_split=split), DEVICES)
    assert str(caught.value) == f"--tensor-split: {numbers} for 3 devices: {NAMES}"


def test_a_main_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        used_devices(placement(split_mode="none", main_gpu=3), DEVICES)
    assert str(caught.value) == (f"--main-gpu: 3 is not one of llama.cpp's devices, which are numbered from 0: {NAMES}")


def test_without_devices_there_is_nothing_to_check() -> None:
    """All layers then run on the CPU, and a note says so."""
    assert used_devices(placement(tensor_split="1,1"), []) == []
    assert used_devices(placement(split_mode="none", main_gpu=3), []) == []


MIB = 1 << 20
TRAINED = 1 << 20
LAYERS = 8
LAYER_TOKEN = 2 * 2 * 32 * 2  # bytes of a token in the cache of a layer: keys and values of two heads as f16


def decided(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int, asked: OpenOptions, gpus: tuple[int, ...] = (64 * GIB,)
) -> tuple[int, int]:
    """Decide the context size and the number of GPU layers of a model of eight layers.

    room  free bytes in main memory for the cache
    """
    tiny_llama(path, layers=LAYERS, head_size=32, context=TRAINED, weight_type="F32")
    devices = [{"description": "GPU", "free": free, "total": 80 * GIB} for free in gpus]
    with open_gguf(path) as file:
        buffers = footprint_on_llama(file, cache=KVBytes(0)).pinned
        monkeypatch.setattr(module, "free_memory", lambda: buffers + room)
        return decide_placement(asked, file, (), TRAINED, lambda: devices)[:2]


@pytest.mark.parametrize(("gpu_layers", "on_cpu"), [(0, 8), (1, 8), (2, 7), (8, 1), (9, 0), (100, 0), (ALL_LAYERS, 0)])
def test_the_cache_of_layers_on_the_cpu_must_fit_in_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_layers: int, on_cpu: int
) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), context_size=4096, gpu_layers=gpu_layers)
    enough = on_cpu * 4096 * LAYER_TOKEN
    assert decided(path, monkeypatch, enough, asked) == (4096, gpu_layers)
    if on_cpu:
        with pytest.raises(DoesNotFit, match=r"a KV cache of 4,096 tokens .*need") as caught:
            decided(path, monkeypatch, enough - 1, asked)
        assert caught.value.hint.startswith("try --ctx-size 4064, the largest that fits")


def test_a_default_context_is_smaller_if_layers_on_the_cpu_have_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), context_size=None, gpu_layers=5)
    assert decided(path, monkeypatch, 4 * GIB, asked) == (LARGEST_DEFAULT, 5)
    context, _ = decided(path, monkeypatch, 8 * MIB, asked)
    assert 512 < context <= 8 * MIB // 2 // (4 * LAYER_TOKEN)


def test_layers_that_auto_leaves_on_the_cpu_must_fit_in_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), context_size=1 << 20, gpu_layers=AUTO)
    gpus = (3 * GIB,)  # a GiB of which is left free
    _, gpu_layers = decided(path, monkeypatch, 64 * GIB, asked, gpus)
    assert 0 < gpu_layers <= LAYERS
    with pytest.raises(DoesNotFit, match="not enough memory"):
        decided(path, monkeypatch, MIB, asked, gpus)


def test_without_devices_all_layers_must_fit_in_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), context_size=4096, gpu_layers=ALL_LAYERS)
    enough = LAYERS * 4096 * LAYER_TOKEN
    assert decided(path, monkeypatch, enough, asked, gpus=()) == (4096, ALL_LAYERS)
    with pytest.raises(DoesNotFit):
        decided(path, monkeypatch, enough - 1, asked, gpus=())


ENCODER = 200 * MIB
WORKING = 50 * MIB


def projector(
    *, weight_bytes: int = ENCODER, working: int = WORKING, is_causal: bool = True, most_rows: int = 1024
) -> ProjectorFile:
    """Return a projector with a large encoder, whose activations need `working` bytes."""
    sizes = {"weight_bytes": weight_bytes, "memory_bytes": weight_bytes + working}
    return cast(ProjectorFile, SimpleNamespace(is_causal=is_causal, most_rows=most_rows, **sizes))


def placed(path: Path, asked: OpenOptions, free: int, *, encoder: ProjectorFile | None) -> Placement:
    tiny_llama(path, layers=LAYERS, head_size=32, context=TRAINED, weight_type="F32")
    devices = [{"description": "GPU", "free": free, "total": 80 * GIB}]
    with open_gguf(path) as file:
        return decide_placement(asked, file, (), TRAINED, lambda: devices, encoder)


def test_projectors_need_memory_besides_their_models(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    with open_gguf(path) as file:
        alone, both, on_gpu = (
            footprint_on_llama(file, cache=KVBytes(1), projector=found, encodes_on_gpu=gpu)
            for found, gpu in [(None, False), (projector(), False), (projector(), True)]
        )
    assert both.weights - alone.weights == ENCODER
    assert both.scratch - alone.scratch == WORKING
    assert both.mapped == alone.mapped
    for each in (both, on_gpu):  # the encoder's process contains the vocabulary, too
        assert each.programs - alone.programs == LLAMA_PROCESS
        assert each.vocabulary == 1.5 * alone.vocabulary
    assert (on_gpu.weights, on_gpu.scratch) == (alone.weights, alone.scratch)


def test_two_way_masks_need_larger_batches(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    large = projector(is_causal=False, most_rows=1120, weight_bytes=0, working=0)
    assert [rows_at_once(each) for each in (None, projector(), large)] == [512, 512, 1120]
    with open_gguf(path) as file:
        usual, more = (footprint_on_llama(file, cache=KVBytes(1), projector=each).scratch for each in (None, large))
        assert more == pytest.approx(usual * 1120 / 512)
        assert layer_sizes(file, 4096, rows=1120).computing > layer_sizes(file, 4096).computing


def test_encoders_take_room_from_gpu_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), context_size=1 << 20, gpu_layers=AUTO)
    monkeypatch.setattr(module, "free_memory", lambda: 64 * GIB)
    without = placed(path, asked, 4 * GIB, encoder=None)
    fewer = placed(path, asked, 4 * GIB, encoder=projector(weight_bytes=GIB))
    assert 0 < fewer.gpu_layers < without.gpu_layers
    assert fewer.encodes_on_gpu
    # An encoder that would displace all layers, or layers that were asked for, runs on the CPU.
    assert placed(path, asked, 4 * GIB, encoder=projector(weight_bytes=4 * GIB)) == without
    for layers in (fewer.gpu_layers, fewer.gpu_layers + 1):
        found = placed(path, replace(asked, gpu_layers=layers), 4 * GIB, encoder=projector(weight_bytes=GIB))
        assert found == (1 << 20, layers, layers == fewer.gpu_layers)


def test_encoders_need_a_context_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for the process comes on top of the encoder, even if the encoder is small."""
    path, asked = tmp_path / "tiny.gguf", replace(placement(), gpu_layers="all")
    monkeypatch.setattr(module, "free_memory", lambda: 64 * GIB)
    model = placed(path, asked, 2 * GIB, encoder=None)
    small = projector(weight_bytes=0, working=0)
    assert model == (512, ALL_LAYERS, False)
    assert placed(path, asked, GIB + GPU_CONTEXT, encoder=small) == (512, ALL_LAYERS, False)
    assert placed(path, asked, GIB + GPU_CONTEXT + 64 * MIB, encoder=small) == (512, ALL_LAYERS, True)


def test_encoders_beside_a_model_on_a_gpu_must_fit_in_main_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), gpu_layers="all")
    monkeypatch.setattr(module, "free_memory", lambda: GIB)
    assert placed(path, asked, 4 * GIB, encoder=projector(weight_bytes=GIB)) == (512, ALL_LAYERS, True)
    with pytest.raises(DoesNotFit):
        placed(path, asked, GIB, encoder=projector(weight_bytes=GIB))


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_checkpoints_after_images_need_memory(tmp_path: Path, name: str) -> None:
    """Only models that read images make checkpoints."""
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        alone, both = (footprint_on_llama(file, cache=KVBytes(1), projector=each) for each in (None, projector()))
        state = cache_by_context(file).states
        assert both.scratch - alone.scratch == WORKING + n_checkpoints(state) * state > WORKING


@pytest.mark.parametrize(("n_bytes", "expected"), [(1, 64), (50 * MIB, 5), (GIB, 2)])
def test_large_states_have_few_checkpoints(n_bytes: int, expected: int) -> None:
    assert n_checkpoints(n_bytes) == expected


def test_encoders_must_fit_in_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "tiny.gguf", replace(placement(), gpu_layers=0)
    tiny_llama(path, layers=LAYERS, head_size=32, context=TRAINED, weight_type="F32")
    with open_gguf(path) as file:
        enough = footprint_on_llama(file, cache=KVBytes(0)).pinned + GIB
    monkeypatch.setattr(module, "free_memory", lambda: enough)
    assert placed(path, asked, 0, encoder=projector()) == (512, 0, False)
    with pytest.raises(DoesNotFit):
        placed(path, asked, 0, encoder=projector(weight_bytes=2 * GIB))
