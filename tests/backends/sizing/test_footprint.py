"""Tests of the memory forecast from a model's header, against the peak of a real process on either backend."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.cache_size import MAX_ROWS, footprint_on_cpu
from llmrun.backends.cpu.kind import CpuKind
from llmrun.backends.llama import placement as llama_footprint
from llmrun.backends.llama.kind import LlamaKind
from llmrun.backends.llama.placement import cache_by_context, footprint_on_llama
from llmrun.backends.registry import BackendKind
from llmrun.backends.sizing import _TEXT_TOKEN, Footprint, KVBytes
from llmrun.formats.gguf.adapter import open_adapter
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import CHUNK, SPLIT_ROWS
from llmrun.model.archs.parts.architecture import plan_of_header
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_adapters import tiny_adapter
from tests.support.models.tiny_models import tiny_model

PROMPT_WORDS = 300  # more than one batch holds
CONTEXT = 512
LONG_CONTEXT = 131_072


def on_cpu(path: Path, context: int = CONTEXT) -> Footprint:
    with open_gguf(path) as file:
        return CpuKind().footprint(file, OpenOptions(context_size=context, threads=2))


def on_llama(path: Path) -> Footprint:
    with open_gguf(path) as file:
        return footprint_on_llama(file, cache=cache_by_context(file))


def measured_peak(path: Path, backend: str, prompt: Path, context: int = CONTEXT) -> int:
    """Return the peak memory of `llmrun generate` and its child processes with the whole prompt in the cache."""
    program = """
import sys
from llmrun.base.machine.memory import peak_memory
from llmrun.__main__ import main
from llmrun.engine.engine import Engine
close = Engine.close
def told(self):
    print("peak", peak_memory(), file=sys.stderr, flush=True)
    close(self)
Engine.close = told
main()
"""
    arguments = ["generate", "-m", str(path), "-f", str(prompt), "-n", "4", "--raw", "--backend", backend]
    arguments += ["-c", str(context), "--kv-type", "f16", "-t", "2", "--gpu-layers", "0"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=600
    )
    return int(re.findall(r"^peak (\d+)$", done.stderr, re.MULTILINE)[0])


@pytest.mark.night
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a peak that begins with the program")
@pytest.mark.parametrize(("backend", "held"), [("cpu", PROMPT_WORDS), ("llama", CONTEXT)])
def test_the_peak_of_a_real_process_is_within_5_percent(tmp_path: Path, backend: str, held: int) -> None:
    """Our cache takes memory as it fills; llama.cpp allocates all of its cache at once."""
    footprint = on_cpu(smollm2()) if backend == "cpu" else on_llama(smollm2())
    (tmp_path / "prompt").write_text("hello " * PROMPT_WORDS)
    assert footprint.total(held) == pytest.approx(measured_peak(smollm2(), backend, tmp_path / "prompt"), rel=0.05)


@pytest.mark.night
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a peak that begins with the program")
def test_a_context_of_131072_tokens_has_one_cache(tmp_path: Path) -> None:
    """A second copy of the cache would take 16.8 MB. The last step of the prompt needs the most partial results."""
    path = tiny_llama(tmp_path / "long.gguf", layers=1, heads=1, kv_heads=1, head_size=32, context=LONG_CONTEXT)
    n_tokens = LONG_CONTEXT - MAX_ROWS + SPLIT_ROWS
    words = random.Random(0).choices("bcdfjkmpqvxyz", k=n_tokens // 2)  # no letter is part of a longer token
    (tmp_path / "prompt").write_text(" ".join(words))
    footprint = on_cpu(path, LONG_CONTEXT)
    cache = footprint.cache.of(LONG_CONTEXT)
    assert cache == LONG_CONTEXT * 2 * 32 * 2  # keys and values, features, bytes
    peak = measured_peak(path, "cpu", tmp_path / "prompt", LONG_CONTEXT)
    assert -cache / 2 < peak - footprint.total(n_tokens) < cache / 4


def test_partial_results_of_attention_are_counted_for_the_whole_context(tmp_path: Path) -> None:
    """Steps of few rows store the state of each row and head in each chunk, with 16 more floats than features."""
    path = tiny_llama(tmp_path / "tiny.gguf", layers=1, heads=4, kv_heads=2, context=LONG_CONTEXT)
    few, many, more = (on_cpu(path, context).scratch for context in (CHUNK, LONG_CONTEXT, 8 * LONG_CONTEXT))
    assert many - few == SPLIT_ROWS * (LONG_CONTEXT // CHUNK - 1) * 4 * (16 + 16) * 4
    assert more == many


def test_the_total_is_a_sum_of_which_the_header_gives_way_to_the_cache() -> None:
    one = Footprint(weights=1000, cache=KVBytes(10), scratch=5, vocabulary=100, header=50, programs=10_000, mapped=600)
    assert one.total(0) == 10_000 + 1000 + 100 + 50
    assert one.total(100) == 10_000 + 1000 + 100 + 5 + 1000 + 100 * _TEXT_TOKEN
    assert one.pinned == 400 + 5 + 100


def test_a_cache_for_more_sequences_and_of_another_type_is_counted(tmp_path: Path) -> None:
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf")) as file:
        plan = plan_of_header(file)
        sizes = [
            footprint_on_cpu(
                file, plan, max_sequences=n, context_size=CONTEXT, kv_type=kv_type, max_rows=rows, n_threads=2
            )
            for n, kv_type, rows in (
                (1, "f16", 256),
                (3, "f16", 256),
                (1, "q8_0", 256),
                (1, "f16", 512),
                (1, "q4_0:q8_0", 256),
            )
        ]
    assert [one.cache.token for one in sizes] == [256, 768, 144, 256, 112]
    assert sizes[3].scratch > 1.8 * sizes[0].scratch


@pytest.mark.parametrize(
    ("machine", "flags", "weight_type", "tied", "share"),
    [
        ("x86_64", "avx2", "Q4_0", True, 1.0),
        ("x86_64", "avx2", "Q8_0", True, 0.0),
        ("arm64", "", "Q8_0", True, 1.0),
        ("aarch64", "", "F32", True, 0.0),
        ("x86_64", "avx2", "Q4_0", False, 0.9),  # a table that is only looked up is not repacked
    ],
)
def test_llama_cpp_has_matrices_twice_that_its_kernels_take_in_another_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    flags: str,
    weight_type: str,
    tied: bool,
    share: float,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(llama_footprint, "processor_flags", lambda: frozenset(flags.split()))
    path = tiny_llama(tmp_path / "tiny.gguf", weight_type=weight_type, tied=tied)
    with open_gguf(path) as file:
        matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
        counted = [one for one in matrices if share == 1.0 or (share and one.name != "token_embd.weight")]
        footprint = footprint_on_llama(file, cache=KVBytes(1))
        assert footprint.weights == file.file_bytes + sum(one.nbytes for one in counted if one.shape[1] % 8 == 0)
        assert footprint.mapped == file.file_bytes


def test_layers_on_a_gpu_take_no_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type="Q8_0", layers=4)) as file:
        first, both = (footprint_on_llama(file, cache=KVBytes(1), layers=layers) for layers in (1, 2))
        layer = [tensor for name, tensor in file.tensors.items() if name.startswith("blk.0.")]
    whole = sum(tensor.nbytes for tensor in layer)
    repacked = sum(tensor.nbytes for tensor in layer if len(tensor.shape) > 1)
    assert (first.mapped, first.weights) == (whole, whole + repacked)
    assert (both.mapped, both.weights) == (2 * first.mapped, 2 * first.weights)


@pytest.mark.parametrize("kind", [CpuKind(), LlamaKind()])
def test_adapters_are_counted(tmp_path: Path, kind: BackendKind) -> None:
    """The CPU engine unpacks their matrices to float32, and llama.cpp reads them as they are."""
    path = tiny_model(tmp_path, "Q8_0 one KV head")
    adapters = [tiny_adapter(tmp_path / f"{rank}.gguf", path, rank=rank, weight_type="F16") for rank in (16, 64)]
    options = OpenOptions(context_size=256, threads=1)
    with open_gguf(path) as file:
        files = [open_adapter(adapter, file) for adapter in adapters]
        plain = kind.footprint(file, options)
        found = kind.footprint(file, replace(options, adapters=[*map(str, adapters)]))
    expected = sum(adapter.nbytes for adapter in files)
    if isinstance(kind, CpuKind):
        assert found.weights - plain.weights == 2 * expected
        assert found.scratch - plain.scratch >= MAX_ROWS * (16 + 64) * 4
    else:
        assert structs.replace(found, weights=found.weights - expected) == plain
    for adapter in files:
        adapter.file.close()
