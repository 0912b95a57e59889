"""Tests of the chosen context size, and of sizes that are refused."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import backend as cpu
from llmrun.backends.cpu import cache_size
from llmrun.backends.llama import placement
from llmrun.backends.llama.placement import bytes_needed, layer_sizes
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.registry import open_backend
from llmrun.backends.sizing import (
    LARGEST_DEFAULT,
    LARGEST_FILLED_DEFAULT,
    Footprint,
    KVBytes,
    MemoryNeeds,
    context_for,
    shared_cache_tokens,
)
from llmrun.base.errors import DoesNotFit
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_gpus import GIB, pretend_gpus
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.gguf.gguf_files import tiny_llama

MIB = 1 << 20


def chosen(asked: int | None, train_context: int, needs: MemoryNeeds) -> int:
    return context_for(
        asked, train_context=train_context, largest_default=LARGEST_DEFAULT, needs=needs, path="model.gguf"
    )


@pytest.mark.parametrize(
    ("free", "max_sequences", "expected"),
    [
        (None, 4, 4096),  # full contexts
        (100_000, 4, 4096),
        (9_000, 4, 2048),  # half of what the model leaves free
        (9_000, 1, 1024),
        (2_000, 4, 1024),  # at least one context
    ],
)
def test_sequences_that_share_a_cache_get_what_fits(free: int | None, max_sequences: int, expected: int) -> None:
    """The model takes 800 bytes, and each token of a sequence 2 bytes."""
    needs = MemoryNeeds(Footprint(800, KVBytes(2 * max_sequences)), free)
    assert shared_cache_tokens(1024, max_sequences, needs) == expected


def footprint_of(mapped: int, packed: int, cache: KVBytes, scratch: int, vocabulary: int) -> Footprint:
    return Footprint(mapped + packed, cache, scratch, vocabulary, mapped=mapped)


@pytest.mark.parametrize(
    ("train_context", "free", "expected"),
    [
        (500, None, 500),
        (131_072, None, LARGEST_DEFAULT),
        (131_072, 1000 * MIB, LARGEST_DEFAULT),
        (2048, 1000 * MIB, 2048),
        (131_072, 100 * MIB + 20_000 * 1024, 9984),  # half of it, in whole blocks
        (131_072, 100 * MIB + 600 * 1024, 512),  # the smallest useful context, even though it takes more than half
        (300, 100 * MIB + 300 * 1024, 300),
    ],
)
def test_the_default_is_the_models_own_up_to_a_limit_and_half_of_what_is_free(
    train_context: int, free: int | None, expected: int
) -> None:
    assert chosen(None, train_context, MemoryNeeds(Footprint(100 * MIB, KVBytes(1024)), free)) == expected


kv_windows = st.tuples(st.integers(1, 1 << 15), st.integers(1, 1 << 24))


@given(
    st.none() | st.integers(1, 1 << 20),
    st.integers(1, 1 << 27),
    st.builds(
        MemoryNeeds,
        footprint=st.builds(
            footprint_of,
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 40),
            st.builds(KVBytes, st.integers(0, 1 << 24), st.just(()) | st.tuples(kv_windows)),
            st.integers(0, 1 << 30),
            st.integers(0, 1 << 30),
        ),
        free=st.none() | st.integers(0, 1 << 42),
        parameters=st.integers(0, 1 << 40),
    ),
)
def test_what_is_chosen_fits_and_what_is_refused_does_not(
    asked: int | None, train_context: int, needs: MemoryNeeds
) -> None:
    try:
        context = chosen(asked, train_context, needs)
    except DoesNotFit:
        assert needs.free is not None
        assert not needs.fits(asked or min(train_context, 512))
        assert needs.most == 0 or needs.fits(needs.most)
        assert not needs.fits(needs.most + 32)
        return
    assert needs.fits(context)
    assert context == asked or 1 <= context <= min(train_context, LARGEST_DEFAULT)


def test_windows_are_counted_once_they_are_full() -> None:
    """Eight tokens of the windowed layers take as much memory as 128 tokens of all the others."""
    needs = MemoryNeeds(Footprint(0, KVBytes(MIB, ((8, 16 * MIB),))), 256 * MIB)
    assert needs.most == 128
    assert [needs.fits(context) for context in (8, 128, 129)] == [True, True, False]
    with pytest.raises(DoesNotFit, match="a KV cache of 200 tokens needs 328 MiB") as caught:
        chosen(200, 4096, needs)
    assert caught.value.hint.startswith("try --ctx-size 128, ")
    assert chosen(10**6, 4096, MemoryNeeds(Footprint(0, KVBytes(0, ((8, 16 * MIB),))), 128 * MIB)) == 10**6


def test_a_context_that_does_not_fit_is_one_line_with_the_sum_and_the_most_that_would() -> None:
    with pytest.raises(DoesNotFit) as caught:
        chosen(100_000, 131_072, MemoryNeeds(Footprint(100 * MIB, KVBytes(MIB)), 1000 * MIB))
    assert str(caught.value) == (
        "not enough memory for model.gguf: weights (100 MiB) and a KV cache of 100,000 tokens (100,000 MiB) need "
        "100,100 MiB, but only 1,000 MiB is free"
    )
    assert caught.value.hint == (
        "try --ctx-size 896, the largest that fits, or --kv-type q8_0, which halves the KV cache"
    )
    assert caught.value.exit_code == 7


def test_the_sum_counts_scratch_and_the_vocabulary_and_a_smaller_quantization_is_named() -> None:
    needs = MemoryNeeds(
        Footprint(1000 * MIB, KVBytes(MIB // 8), 30 * MIB, 20 * MIB), 600 * MIB, parameters=1_000_000_000
    )
    with pytest.raises(DoesNotFit) as caught:
        chosen(1024, 131_072, needs)
    assert str(caught.value) == (
        "not enough memory for model.gguf: weights (1,000 MiB), buffers (50 MiB) and a KV cache of 1,024 tokens "
        "(128 MiB) need 1,178 MiB, but only 600 MiB is free"
    )
    assert caught.value.hint == "try a quantization with at most 4.1 bits per weight (this one has 8.4)"
    with pytest.raises(DoesNotFit) as caught:
        chosen(1024, 131_072, structs.replace(needs, free=200 * MIB))
    assert caught.value.hint == "try a smaller model, or close other programs"


def test_weights_that_are_mapped_may_be_larger_than_memory() -> None:
    needs = MemoryNeeds(Footprint(100 * MIB, KVBytes(MIB // 32), mapped=100 * MIB, kv_type="q4_0"), 50 * MIB)
    assert chosen(None, 131_072, needs) == 512
    assert chosen(1600, 131_072, needs) == 1600
    with pytest.raises(DoesNotFit, match="a KV cache of 1,601 tokens needs 50 MiB") as caught:
        chosen(1601, 131_072, needs)
    assert caught.value.hint == "try --ctx-size 1600, the largest that fits"


@pytest.mark.parametrize(("kv_type", "smaller"), [("f16:q4_0", "q8_0"), ("q8_0", "q4_0"), ("q8_0:q4_0", "q4_0")])
def test_a_smaller_type_of_cache_is_recommended(kv_type: str, smaller: str) -> None:
    with pytest.raises(DoesNotFit) as caught:
        chosen(1601, 131_072, MemoryNeeds(Footprint(0, KVBytes(MIB // 32), kv_type=kv_type), 50 * MIB))
    assert caught.value.hint is not None
    assert f"--kv-type {smaller}, which halves" in caught.value.hint


@pytest.mark.parametrize("backend", ["cpu", "llama"])
def test_a_context_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("something was loaded")

    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    for module in (cache_size, placement):
        monkeypatch.setattr(module, "free_memory", lambda reserved=0: 10 * MIB - reserved)
    monkeypatch.setattr(cpu, "allocate", never)
    monkeypatch.setattr(LlamaProcess, "tell", never)
    with pytest.raises(DoesNotFit, match=r"of 1,000,000 tokens.*but only 10 MiB is free") as caught:
        open_backend(path, OpenOptions(backend=backend, context_size=1_000_000, gpu_layers=0, threads=1))
    assert caught.value.hint.startswith("try --ctx-size ")


@pytest.mark.push
@pytest.mark.parametrize(("backend", "largest"), [("cpu", LARGEST_DEFAULT), ("llama", LARGEST_FILLED_DEFAULT)])
def test_a_cache_that_is_filled_at_once_is_smaller_by_default(tmp_path: Path, backend: str, largest: int) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    opened = open_backend(path, OpenOptions(backend=backend, gpu_layers=0, threads=1))
    opened.close()
    assert opened.info.context_size == largest


@pytest.mark.push
@pytest.mark.parametrize(
    ("room", "gpu_layers", "expected"),
    [
        (1 << 20, "auto", LARGEST_DEFAULT),
        (1 << 20, "all", LARGEST_DEFAULT),
        (LARGEST_DEFAULT, 1, LARGEST_DEFAULT),
        (LARGEST_DEFAULT - 1, "auto", LARGEST_DEFAULT // 2),
        (100, "auto", LARGEST_FILLED_DEFAULT),
        (0, "all", LARGEST_FILLED_DEFAULT),
    ],
)
def test_a_context_on_gpus_displaces_no_layer_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, gpu_layers: int | str, expected: int
) -> None:
    """The GPU has room for all layers with this many tokens in the cache."""
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    with open_gguf(path) as file:
        sizes = layer_sizes(file, room)
    [needed] = bytes_needed(sizes, [GIB], len(sizes.layers) + 1)
    pretend_gpus(monkeypatch, GIB + needed)  # a GiB of each GPU is left free
    opened = open_backend(path, OpenOptions(backend="llama", gpu_layers=gpu_layers, threads=1))
    opened.close()
    assert opened.info.context_size == expected


@pytest.mark.push
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much is resident")
def test_a_context_that_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    """Resident memory after one token is the same for a context a hundred times as large, except for one huge page per
    layer.
    """
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE

    def grown(context_size: int) -> int:
        before = resident()
        backend = open_backend(path, OpenOptions(backend="cpu", context_size=context_size, threads=1))
        backend.forward(batch_of(rows(0, 0, [5])))
        after = resident()
        backend.close()
        return after - before

    grown(256)  # loads kernels and modules
    assert grown(1 << 18) - grown(256) < 16 * MIB  # out of 64 MiB


@pytest.mark.push
@pytest.mark.parametrize("backend", ["cpu", "llama"])
def test_sequences_that_share_a_cache_have_the_context_of_one(tmp_path: Path, backend: str) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    options = OpenOptions(backend=backend, gpu_layers=0, threads=1)
    one, many = (open_backend(path, each) for each in (options, replace(options, max_sequences=4, kv_tokens="auto")))
    for opened in (one, many):
        opened.close()
    assert many.info.context_size == one.info.context_size
    assert many.kv.capacity == one.info.context_size * (4 if backend == "cpu" else 1)


@pytest.mark.push
def test_a_shared_cache_takes_half_of_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", context=1 << 20)
    monkeypatch.setattr(cache_size, "free_memory", lambda **_: 40 * MIB)
    options = OpenOptions(backend="cpu", threads=1)
    opened = open_backend(path, replace(options, max_sequences=64, kv_tokens="auto"))
    opened.close()
    single = open_backend(path, options)
    single.close()
    context = single.info.context_size
    assert opened.info.context_size == context
    assert context <= opened.kv.capacity < 64 * context
    assert opened.info.kv_bytes <= 20 * MIB
