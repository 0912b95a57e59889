"""Tests of which models are recommended for a machine, and that copies of other programs count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from llmrun.backends.cpu.speeds.forecast import rough_decode_speed
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.experience import CORRECTED, ESTIMATED, RUNS, Experience
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.run_speeds import Run, run_key
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub import recommendation
from llmrun.hub.catalog import CatalogEntry, load_catalog
from llmrun.hub.recommendation import Candidate, Recommended, candidates, chosen, recommended
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.model_stores import Stores
from tests.support.vision.projectors import tiny_projector, tiny_text_model

GB = 10**9


class Machine:
    """The speeds of a machine that reads this many bytes of weights per second."""

    def __init__(self, bytes_per_second: float, *, knows_weights: bool = False) -> None:
        self.bytes_per_second, self.knows_weights, self.disturbance = bytes_per_second, knows_weights, ""

    def weights_read(self) -> float:
        return self.bytes_per_second


def machine(memory: float | None, gbps: float = 30, *, gpu: float = 0) -> Resources:
    gpus = [{"description": "card", "free": int(gpu * GB), "total": int(gpu * GB)}] if gpu else []
    free = int(memory * GB) if memory is not None else None
    return Resources(free, gpus, 2, cast("Speeds", Machine(gbps * GB)))


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    made = Stores(tmp_path)
    made.enter(monkeypatch)
    return made


def names(found: Sequence[Recommended]) -> dict[str, list[str]]:
    return {each.model.name: each.purposes for each in found}


@pytest.mark.parametrize(
    ("memory", "gbps", "expected"),
    [
        (0.1, 30, {}),
        (0.6, 30, {"smollm2:135m": ["fast", "balanced", "best"]}),  # toys only if nothing larger fits
        (2.5, 30, {"gemma3:1b": ["fast"], "qwen2.5:1.5b": ["balanced", "best"]}),
        (10, 30, {"gemma3:1b": ["fast"], "llama3.2:3b": ["balanced"], "ministral-3:8b": ["best"]}),
        (32, 30, {"gemma3:1b": ["fast"], "qwen3:30b-instruct": ["balanced", "best"]}),
        (32, 5, {"gemma3:1b": ["fast", "best"]}),  # 7 tokens per second are not balanced
        (32, 1, {"gemma3:1b": ["fast", "best"]}),  # nothing is readable
        (256, 200, {"gpt-oss:120b": ["fast", "balanced", "best"]}),
    ],
)
def test_larger_and_faster_machines_get_larger_models(
    memory: float, gbps: float, expected: dict[str, list[str]]
) -> None:
    assert names(recommended(machine(memory, gbps))) == expected


@pytest.mark.push
def test_recommended_models_fit_and_are_fast_enough() -> None:
    for memory in (2, 3, 5, 9, 17, 33, 80):
        for gbps in (4, 15, 30, 90):
            resources = machine(memory, gbps)
            found = recommended(resources)
            assert 1 <= len(found) <= 3
            purposes = [purpose for each in found for purpose in each.purposes]
            assert purposes in (["fast", "balanced", "best"], ["fast", "best"])
            weights = [each.model.entry.weights or 0 for each in found]
            speeds = [each.model.speed or 0 for each in found]
            assert weights == sorted(weights)
            assert all(each.model.needed <= 0.8 * memory * GB for each in found)
            fastest = max(each.speed or 0 for each in candidates(resources) if (each.entry.weights or 0) > 0.9e9)
            assert speeds[0] >= min(30, fastest) * 0.999
            assert speeds[-1] >= min(5, fastest) * 0.999


def test_only_models_for_chats_are_recommended() -> None:
    entries = [entry for entry in load_catalog().entries() if entry.recommended]
    assert len(entries) >= 10
    for entry in entries:
        assert not entry.thinking
        assert entry.size_of(entry.default)
        assert not any(word in entry.name for word in ("coder", "math", "embed", "base"))


def test_mixtures_of_experts_read_only_the_active_ones() -> None:
    found = {each.name: each for each in candidates(machine(64))}
    mixture, dense = found["qwen3:30b-instruct"], found["mistral-small:24b"]
    assert mixture.read == pytest.approx(mixture.size * 3.3 / 30.53, rel=0.01)
    assert dense.read == dense.size
    assert mixture.speed == pytest.approx(rough_decode_speed(mixture.read, 30 * GB))
    assert mixture.origin == ESTIMATED
    mixtures = [entry for entry in load_catalog().entries() if "mixture of experts" in entry.description]
    assert len(mixtures) > 15
    assert all(entry.active and entry.active < (entry.weights or math.inf) / 2 for entry in mixtures)


def test_models_on_the_gpu_come_first() -> None:
    found = recommended(machine(64, gpu=24))
    assert names(found) == {"gpt-oss:20b": ["fast", "balanced"], "mistral-small:24b": ["best"]}
    assert all(each.model.on_gpu and each.model.speed is None for each in found)
    assert found[0].model.read <= found[1].model.read / 4
    assert names(recommended(machine(10, gpu=1))) == names(recommended(machine(10)))  # a small GPU does not matter


def test_other_systems_are_asked_for_their_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommendation, "available_memory", lambda: 10 * GB)
    assert names(recommended(machine(None))) == names(recommended(machine(10)))


def test_equally_suitable_models_are_shown_once() -> None:
    entry = load_catalog().entry("gemma3:1b")
    model = Candidate("gemma3:1b", GB, False, GB, GB, entry, speed=50.0)
    assert chosen([model]) == [Recommended(model, ["fast", "balanced", "best"])]
    assert chosen([]) == []


def copy(entry: CatalogEntry, resources: Resources) -> Candidate:
    return next(each for each in candidates(resources) if each.entry.name == entry.name)


@pytest.mark.parametrize("holder", ["hub", "ollama", "lmstudio"])
def test_copies_on_this_machine_are_marked_and_used(stores: Stores, tmp_path: Path, holder: str) -> None:
    data = tiny_llama(tmp_path / "tiny.gguf").read_bytes()
    entry = load_catalog().entry("qwen3:4b-instruct")
    file = entry.quants["Q4_K_M"].files[0].file
    if holder == "hub":
        source = entry.quants["Q4_K_M"].sources[0]
        stores.shared(getattr(source, "repository", ""), {file: data})
        name = "qwen3:4b-instruct"
    elif holder == "ollama":
        stores.ollama(data, "qwen3", "4b-instruct")
        name = "ollama:qwen3:4b-instruct"
    else:
        stores.lm_studio(f"someone/some-GGUF/{file}", data)
        name = f"lmstudio:someone/some-GGUF/{file}"
    found = copy(entry, machine(64))
    assert (found.name, found.is_here, found.is_exact, found.size) == (name, True, True, len(data))
    assert found.needed < GB
    assert found.speed == pytest.approx(rough_decode_speed(len(data), 30 * GB))


def test_the_projector_of_a_copy_counts(stores: Stores, tmp_path: Path) -> None:
    entry = load_catalog().entry("gemma3:4b")
    source, file = entry.quants["Q8_0"].sources[0], entry.quants["Q8_0"].files[0].file
    model, projector = tiny_text_model(tmp_path, "gemma3"), tiny_projector(tmp_path, "gemma3")
    files = {file: model.read_bytes(), "mmproj-F32.gguf": projector.read_bytes()}
    stores.shared(getattr(source, "repository", ""), files)
    with open_gguf(model) as opened:
        text_only = fit_of(opened, Resources(None)).needed
    (found,) = candidates(machine(64), lambda each: each.name == entry.name)
    assert found.is_here
    assert text_only + projector.stat().st_size < found.needed < 1e8


def test_another_quantization_that_is_here_counts(stores: Stores, tmp_path: Path) -> None:
    entry = load_catalog().entry("qwen3:4b-instruct")
    source, file = entry.quants["Q8_0"].sources[0], entry.quants["Q8_0"].files[0].file
    stores.shared(getattr(source, "repository", ""), {file: tiny_llama(tmp_path / "tiny.gguf").read_bytes()})
    assert copy(entry, machine(64)).name == "qwen3:4b-instruct-q8_0"


def test_a_damaged_copy_does_not_count(stores: Stores) -> None:
    stores.ollama(b"GGUF", "qwen3", "4b-instruct")
    assert not copy(load_catalog().entry("qwen3:4b-instruct"), machine(64)).is_here


def test_real_runs_say_how_fast_a_copy_is(stores: Stores, tmp_path: Path) -> None:
    blob = stores.ollama(tiny_llama(tmp_path / "tiny.gguf").read_bytes(), "qwen3", "4b-instruct")
    resources = machine(64)
    assert resources.speeds is not None
    run = Run(*run_key(blob, blob.stat().st_size, "cpu", "", 2), decode=87.0)
    seen = Experience(2, resources.speeds, {run.key: run}, (3.0, 1.0))
    resources = Resources(resources.memory, (), 2, cast("Speeds", Machine(30 * GB, knows_weights=True)), seen)
    found = {each.entry.name: each for each in candidates(resources)}
    assert (found["qwen3:4b-instruct"].speed, found["qwen3:4b-instruct"].origin) == (87.0, RUNS)
    other = found["gemma3:1b"]
    assert other.speed == pytest.approx(3 * rough_decode_speed(other.read, 30 * GB))
    assert other.origin == CORRECTED
