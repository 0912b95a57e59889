"""Tests of the memory that vision encoders need, in both backends, and of when it is counted."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace as with_options
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import cache_size
from llmrun.backends.cpu.cache_size import MAX_ROWS, rows_of_step
from llmrun.backends.cpu.vision_costs import EncoderMemory
from llmrun.backends.encoders import opened_projector
from llmrun.backends.llama import placement
from llmrun.backends.llama.vision import LlamaVision
from llmrun.backends.registry import BACKENDS, Entry, backend_named
from llmrun.backends.sizing import LLAMA_PROCESS, vocabulary_bytes
from llmrun.base.errors import DoesNotFit, UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.plan import Plan
from llmrun.model.vision.layout import Projector
from tests.support.vision.opened import vision_of
from tests.support.vision.projectors import WIDTH, tiny_projector, tiny_text_model

CPU, LLAMA = BACKENDS
each_backend = pytest.mark.parametrize("entry", BACKENDS, ids=[entry.name for entry in BACKENDS])
CAUSAL = cast(Plan, SimpleNamespace(is_causal=True))


def both(folder: Path) -> tuple[Path, OpenOptions]:
    """Return a tiny text model, and options with its projector, whose images are causal."""
    projector = tiny_projector(folder, "idefics3")
    options = OpenOptions(context_size=256, threads=1, gpu_layers=0, mmproj=str(projector))
    return tiny_text_model(folder, "idefics3"), options


def test_footprints_of_llama_cpp_contain_the_encoders_process(tmp_path: Path) -> None:
    path, options = both(tmp_path)
    with open_gguf(path) as file:
        alone = LLAMA.kind().footprint(file, OpenOptions(context_size=256, threads=1))
        found = LLAMA.kind().footprint(file, options)
        projector = opened_projector(options, file)
        assert projector is not None
        assert found.weights - alone.weights == projector.weight_bytes > 0
        assert found.scratch - alone.scratch == projector.memory_bytes - projector.weight_bytes > 0
        assert found.vocabulary - alone.vocabulary == vocabulary_bytes(file)
        assert found.programs - alone.programs == LLAMA_PROCESS
        assert (found.cache, found.mapped) == (alone.cache, alone.mapped)


def test_footprints_of_the_cpu_engine_contain_the_encoder(tmp_path: Path) -> None:
    path, options = both(tmp_path)
    with open_gguf(path) as file:
        alone = CPU.kind().footprint(file, OpenOptions(context_size=256, threads=1))
        found = CPU.kind().footprint(file, options)
        projector = opened_projector(options, file)
        assert projector is not None
        memory = EncoderMemory.in_header(projector, 1)
    assert memory.weights >= projector.weight_bytes  # the file is in F32, and matrices may be padded
    patches = projector.most_rows * projector.patches_per_row
    assert memory.scratch > patches * 4 * WIDTH
    expected = replace(alone, weights=alone.weights + memory.weights, scratch=alone.scratch + memory.scratch)
    assert found == expected


@pytest.mark.push
@each_backend
def test_encoders_must_fit_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: Entry) -> None:
    path, options = both(tmp_path)
    with open_gguf(path) as file:
        footprint, projector = entry.kind().footprint(file, options), opened_projector(options, file)
        assert projector is not None
        n_bytes = footprint.pinned + footprint.cache.of(256)
        free = [n_bytes - projector.memory_bytes // 2, n_bytes]
        for module in (cache_size, placement):
            monkeypatch.setattr(module, "free_memory", lambda reserved=0: free[0])
        with pytest.raises(DoesNotFit, match="not enough memory"):
            entry.kind().open(file, options)
        del free[0]
        entry.kind().open(file, options).close()


@pytest.mark.push
def test_llama_cpp_loads_projectors_along_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory is measured first, because the memory of the encoder would otherwise count twice."""
    path, options = both(tmp_path)
    events: list[str] = []
    load, wait = LlamaVision.load, LlamaVision.wait

    def loading(vision: LlamaVision, gpu_bytes: int | None = None) -> None:
        events.append("load")
        load(vision, gpu_bytes)

    def waiting(vision: LlamaVision) -> None:
        events.append("wait")
        wait(vision)

    def free(reserved: int = 0) -> None:
        events.append("measure")

    def progress(words: str, fraction: float) -> None:
        if words == "loading weights" and fraction == 1:
            events.append("loaded")

    monkeypatch.setattr(placement, "free_memory", free)
    monkeypatch.setattr(LlamaVision, "load", loading)
    monkeypatch.setattr(LlamaVision, "wait", waiting)
    with open_gguf(path) as file, closing(LLAMA.kind().open(file, with_options(options, progress=progress))) as backend:
        assert events == ["measure", "load", "loaded", "wait"]
        process = vision_of(backend)._process
        assert not process.has_ended
    assert process.has_ended


@pytest.mark.parametrize(
    ("is_causal", "most_rows", "expected"), [(True, 1120, MAX_ROWS), (False, 1120, 1120), (False, 70, MAX_ROWS)]
)
def test_images_with_two_way_masks_fit_in_a_step(is_causal: bool, most_rows: int, expected: int) -> None:
    projector = cast(Projector, SimpleNamespace(is_causal=is_causal, most_rows=most_rows))
    assert rows_of_step(CAUSAL, 4096, None, projector) == expected
    assert rows_of_step(CAUSAL, 4096, None) == MAX_ROWS


SECTIONS = {"rope.dimension_sections": np.array([6, 5, 5, 0], np.int32)}


@pytest.mark.push
@pytest.mark.parametrize(
    ("backend", "name", "keys", "why"),
    [
        ("cpu", "qwen3vl_merger", SECTIONS | {"n_deepstack_layers": 1}, "rows of 96 numbers, not 192"),
        ("cpu", "qwen3vl_merger qwen35", SECTIONS, "no M-RoPE"),
        ("llama", "qwen3vl_merger qwen35", SECTIONS, "no M-RoPE"),
    ],
)
def test_metadata_cannot_claim_what_architectures_ignore(
    tmp_path: Path, backend: str, name: str, keys: dict[str, Any], why: str
) -> None:
    """The metadata of a qwen3 model makes it look like qwen3vl."""
    path = tiny_text_model(tmp_path, name, text="qwen3vl", architecture="qwen3", keys=keys)
    options = OpenOptions(context_size=256, threads=1, gpu_layers=0, mmproj=str(tiny_projector(tmp_path, name)))
    entry = backend_named(backend)
    assert entry is not None
    with open_gguf(path) as file:
        with pytest.raises(UnsupportedModel) as caught:
            entry.kind().open(file, options)
        assert str(caught.value).startswith(f"images not supported: {path}: the architecture qwen3 has {why}")
        assert "--no-mmproj" in caught.value.hint
        if backend == "cpu":
            with pytest.raises(UnsupportedModel, match=why):
                entry.kind().footprint(file, options)
        entry.kind().open(file, with_options(options, mmproj="")).close()
