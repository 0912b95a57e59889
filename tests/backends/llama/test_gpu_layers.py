"""Tests of how many layers fit on the GPUs: never more than there is room for, and all if there is room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.llama.placement import LayerSizes, bytes_needed, cache_bytes, layer_sizes, layers_that_fit
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.tiny_models import changed_copy

GIB = 1 << 30
MARGIN = GIB

sizes = st.builds(
    LayerSizes,
    layers=st.lists(st.integers(1, 4 * GIB), min_size=1, max_size=40).map(tuple),
    output=st.integers(1, 4 * GIB),
    computing=st.integers(0, GIB),
    visiting=st.integers(0, 4 * GIB),
)
memories = st.lists(st.integers(0, 200 * GIB), min_size=1, max_size=4)


@given(sizes, memories)
def test_no_gpu_gets_more_than_it_has_free_less_the_margin(model: LayerSizes, free: list[int]) -> None:
    n = layers_that_fit(model, free)
    assert 0 <= n <= len(model.layers) + 1
    if n:
        for need, room in zip(bytes_needed(model, free, n), free, strict=True):
            assert need == 0 or need <= room - MARGIN


@given(sizes, st.integers(0, 200 * GIB), st.integers(0, 200 * GIB))
def test_more_memory_never_means_fewer_layers(model: LayerSizes, one: int, other: int) -> None:
    little, much = sorted((one, other))
    assert layers_that_fit(model, [little]) <= layers_that_fit(model, [much])


@given(sizes, memories, st.integers(1, 8))
def test_more_memory_on_every_gpu_never_means_fewer_layers(model: LayerSizes, free: list[int], times: int) -> None:
    assert layers_that_fit(model, free) <= layers_that_fit(model, [times * n for n in free])


@given(sizes, st.integers(1, 200 * GIB))
def test_one_layer_more_than_fits_would_not_fit(model: LayerSizes, free: int) -> None:
    n = layers_that_fit(model, [free])
    for more in range(n + 1, len(model.layers) + 2):
        assert bytes_needed(model, [free], more)[0] > free - MARGIN


@given(sizes, memories, st.data())
def test_a_split_of_the_users_never_fills_a_gpu(model: LayerSizes, free: list[int], data: st.DataObject) -> None:
    parts = st.lists(st.integers(0, 9), min_size=len(free), max_size=len(free)).filter(any)
    split = data.draw(parts)
    n = layers_that_fit(model, free, split)
    for need, part, room in zip(bytes_needed(model, split, n or 1), split, free, strict=True):
        assert not n or need == 0 or need <= room - MARGIN
        assert part or not need


def test_a_split_decides_how_many_layers_fit() -> None:
    """With three quarters of ten layers on it, the GPU with 4 GiB of room is full long before the other one."""
    model = LayerSizes((GIB,) * 9, GIB, 0, 0)
    assert layers_that_fit(model, [5 * GIB, 9 * GIB]) == 10
    assert layers_that_fit(model, [5 * GIB, 9 * GIB], [3, 1]) == 5
    assert layers_that_fit(model, [5 * GIB, 9 * GIB], [0, 1]) == 8


@given(sizes, memories, st.data())
def test_every_offloaded_layer_is_on_some_gpu(model: LayerSizes, free: list[int], data: st.DataObject) -> None:
    free = [n + 1 for n in free]
    n = data.draw(st.integers(1, len(model.layers) + 1))
    needed = bytes_needed(model, free, n)
    weights = sum([*model.layers, model.output][-n:])
    besides = model.computing + (model.visiting if n <= len(model.layers) else 0)
    assert sum(needed) - weights == besides * sum(need > 0 for need in needed)


def test_the_output_layer_goes_first_then_the_last_layers_each_gpu_a_share() -> None:
    """Layers are assigned as in llama.cpp: layer i of n offloaded ones goes to the first GPU whose cumulative share
    exceeds i/n.
    """
    model = LayerSizes(layers=(1, 10, 100, 1000), output=10_000, computing=0, visiting=0)
    assert bytes_needed(model, [GIB], 1) == [10_000]
    assert bytes_needed(model, [GIB], 3) == [11_100]
    assert bytes_needed(model, [GIB, GIB], 5) == [111, 11_000]
    assert bytes_needed(model, [3 * GIB, GIB], 4) == [1110, 10_000]
    assert bytes_needed(model, [GIB, GIB], 1) == [10_000, 0]


def test_layers_that_stay_with_the_cpu_need_room_to_visit_a_gpu() -> None:
    model = LayerSizes(layers=(GIB, GIB), output=GIB, computing=0, visiting=GIB)
    assert layers_that_fit(model, [4 * GIB]) == 3  # all layers, plus the margin
    assert layers_that_fit(model, [4 * GIB - 1]) == 1  # not 2, because the visiting layer would need as much memory


@given(sizes)
def test_a_huge_gpu_takes_all_and_no_gpu_none(model: LayerSizes) -> None:
    assert layers_that_fit(model, [1 << 50]) == len(model.layers) + 1
    assert layers_that_fit(model, []) == 0
    assert layers_that_fit(model, [0]) == 0


def test_a_models_sizes_are_those_of_its_tensors_and_its_cache(tmp_path: Path) -> None:
    """Two layers with 2 KV heads of 16 values take 2 x 2 x 16 x 2 bytes per token and layer."""
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type="F32", layers=2, heads=4, kv_heads=2, head_size=16, width=64)
    with open_gguf(path) as file:
        empty, full = layer_sizes(file, 0), layer_sizes(file, 1000)
        blocks = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.startswith("blk."))
        largest = max(tensor.nbytes for name, tensor in file.tensors.items() if name.startswith("blk."))
        others = sum(tensor.nbytes for name, tensor in file.tensors.items() if not name.startswith("blk."))
    assert sum(empty.layers) == blocks
    assert empty.visiting == largest
    assert empty.output == others  # tied embeddings are copied to the GPU as the output matrix
    assert [a - b for a, b in zip(full.layers, empty.layers, strict=True)] == [1000 * 2 * 2 * 16 * 2] * 2


def test_a_table_of_each_layers_embeddings_stays_with_the_cpu(tmp_path: Path) -> None:
    """Gemma 3n's per-layer embedding table is larger than all of its layers."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["per_layer_token_embd.weight"] = tensors["token_embd.weight"]

    plain = tiny_llama(tmp_path / "tiny.gguf")
    with open_gguf(plain) as one, open_gguf(changed_copy(plain, tmp_path / "other.gguf", change)) as other:
        without, with_it = layer_sizes(one, 0), layer_sizes(other, 0)
        assert replace(with_it, computing=without.computing) == without
        assert with_it.computing == without.computing + 4 * 512 * 4 * 64  # bytes, rows, copies, features


def test_embeddings_that_are_not_the_output_stay_with_the_cpu(tmp_path: Path) -> None:
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", tied=False)) as file:
        expected = sum(file.tensors[name].nbytes for name in ("output.weight", "output_norm.weight"))
        assert layer_sizes(file, 0).output == expected


@pytest.mark.parametrize(
    "claim",
    [
        {"llama.attention.key_length": 1 << 20},
        {"llama.attention.head_count_kv": 1 << 24},
        {"llama.block_count": 255, "llama.embedding_length": 1 << 30},
    ],
)
def test_metadata_cannot_claim_a_cache_much_larger_than_its_matrices_make(
    tmp_path: Path, claim: dict[str, int]
) -> None:
    honest = tiny_llama(tmp_path / "honest.gguf")
    lying = tiny_llama(tmp_path / "lying.gguf", extra=claim)
    with open_gguf(honest) as one, open_gguf(lying) as other:
        assert cache_bytes(one, 1000) == 2 * 1000 * 2 * 2 * (16 + 16)  # layers, tokens, bytes, heads, features
        assert cache_bytes(other, 1000) <= 4 * cache_bytes(one, 1000)
