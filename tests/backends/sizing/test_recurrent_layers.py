"""Tests that the cache forecast for recurrent layers matches llama.cpp's allocations."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.placement import cache_by_context, cache_bytes, layer_sizes, resident_activations
from llmrun.backends.sizing import KVBytes, LayerMemory, layer_memories
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.header_needs import needs_of_file
from tests.support.gguf.gguf_files import write_gguf
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

MIB = 2**20
RECURRENT = LayerMemory(attends=False, convolution=4 * 3 * 128, matrices=4 * 16 * 64)


@pytest.mark.push
@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "lfm2 window",
        "qwen35",
        "qwen35 layers by name, with a layer ahead",
        "qwen35moe fused, with a layer ahead",
        "qwen3next",
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "nemotron_h_moe Super, with a layer ahead",
        "falcon-h1",
        "jamba",
    ],
)
def test_the_forecast_matches_llama_cpps_allocations(tmp_path: Path, name: str) -> None:
    """llama.cpp logs sizes rounded to 0.01 MiB, so there are enough sequences to make the states larger than that."""
    options = OpenOptions(threads=1, context_size=256, gpu_layers=0, max_sequences=128)
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        backend = LlamaBackend(file, options)
        backend.close()
        forecast = cache_by_context(file, max_sequences=128)
    log = "\n".join(backend.log)
    keys_and_values = sum(map(float, re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", log)))
    [states] = re.findall(r"llama_memory_recurrent: size = +([\d.]+) MiB", log)
    assert forecast.states == pytest.approx(float(states) * MIB, abs=0.005 * MIB)
    assert backend.info.kv_bytes == pytest.approx((keys_and_values + float(states)) * MIB, abs=0.01 * MIB)
    assert forecast.of(256) == pytest.approx(backend.info.kv_bytes, rel=0.01)


@pytest.mark.push
@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "nemotron_h", "falcon-h1"])
def test_activations_of_wide_layers_are_forecast(tmp_path: Path, name: str) -> None:
    sizes = {"ssm.state_size": 64, "ssm.inner_size": 1024, "ssm.time_step_rank": 16}
    keys = {**TINY_ARCHITECTURES[name].keys, **sizes}
    with open_gguf(tiny_architecture(tmp_path, name, keys=keys, width=512, feed_forward=1024)) as file:
        backend = LlamaBackend(file, OpenOptions(threads=1, context_size=512, gpu_layers=0))
        backend.close()
        [buffer] = re.findall(r"compute buffer size = +([\d.]+) MiB", "\n".join(backend.log))
        assert resident_activations(file) == pytest.approx(float(buffer) * MIB, rel=0.2)


def test_layers_have_keys_and_values_or_a_state_or_both(tmp_path: Path) -> None:
    with open_gguf(tiny_architecture(tmp_path, "qwen35")) as file:
        assert layer_memories(file) == [RECURRENT, RECURRENT, LayerMemory(), RECURRENT]
    with open_gguf(tiny_architecture(tmp_path, "falcon-h1")) as file:
        assert layer_memories(file) == [LayerMemory(True, RECURRENT.convolution, RECURRENT.matrices)] * 2


def test_states_count_for_their_layer_without_any_tokens(tmp_path: Path) -> None:
    with open_gguf(tiny_architecture(tmp_path, "qwen35")) as file:
        of_state = 3 * RECURRENT.state_bytes
        assert cache_bytes(file, 0, max_sequences=2) == 2 * of_state
        one, two = (layer_sizes(file, 0, max_sequences=n).layers for n in (1, 2))
        more = [later - earlier for earlier, later in zip(one, two, strict=True)]
        assert more == [RECURRENT.state_bytes] * 2 + [0, RECURRENT.state_bytes]
        assert needs_of_file(file).kv_read == KVBytes(2 * 2 * 2 * 32, states=2 * 3 * RECURRENT.matrices)


def test_states_are_no_larger_than_tensors_allow(tmp_path: Path) -> None:
    metadata = {"general.architecture": "made", "made.block_count": 1}
    metadata |= {"made.ssm.state_size": 2**40, "made.ssm.inner_size": 2**40}
    tensors = {"blk.0.ssm_conv1d.weight": ("F32", np.zeros((8, 4), np.float32))}
    with open_gguf(write_gguf(tmp_path / "made.gguf", metadata, tensors)) as file:
        assert layer_memories(file) == [LayerMemory(False, 4 * 3 * 8, 4 * 8 * 8)]
