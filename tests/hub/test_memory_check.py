"""A model that this machine cannot hold is refused before it is fetched, with the sum and what to take instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.backends import free_memory
from llmrun.errors import DoesNotFit
from llmrun.hub import huggingface
from llmrun.hub.catalog import load_catalog
from llmrun.hub.memory_check import require_memory, smaller_choice
from llmrun.hub.model import Artifact, HubSource, PypiSource, RemoteFile, UrlSource, Wanted
from tests.support.fake_hub import FakeHub, Fault, fake_hub
from tests.support.gguf_files import tiny_llama
from tests.support.hub_client import at_hub

CATALOGUE = """
[models."toy:1b"]
description = "A toy"
license = "MIT"
repository = "o/n"
default = "Q4_0"
quants.Q4_0 = { file = "m-Q4_0.gguf", about = "1 MiB" }
quants.Q5_0 = { file = "m-Q5_0.gguf", about = "2 MiB" }
quants.Q8_0 = { file = "m-Q8_0.gguf", about = "3 MiB" }
quants.F16 = { file = "m-F16.gguf" }
seen = "here"
"""
WANTED = Wanted("hf:o/n:Q8_0", (HubSource("o/n", None, "Q8_0"),))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "models.toml").write_text(CATALOGUE)
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        models = {
            f"m-{kind}.gguf": tiny_llama(tmp_path / kind, weight_type=kind, layers=4).read_bytes()
            for kind in ("Q8_0", "Q4_0")
        }
        running.add("o/n", models)
        yield running


def pinned() -> Artifact:
    return huggingface.pin(HubSource("o/n", "m-Q8_0.gguf"), (), name=WANTED.name)


def memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int | None) -> None:
    monkeypatch.setattr(free_memory, "whole_memory", lambda: n_bytes)


def asked_for_bytes(hub: FakeHub) -> bool:
    return any(asked.method == "GET" for asked in hub.asked if asked.at != "api")


def test_what_is_small_beside_the_memory_is_not_looked_at(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    for n_bytes in (2 * artifact.size, None):
        memory(monkeypatch, n_bytes)
        require_memory(artifact, WANTED)
    assert not asked_for_bytes(hub)


def test_what_fits_closely_is_let_through_by_its_header(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, 100 * artifact.size)
    monkeypatch.setattr("llmrun.hub.memory_check._SURELY_FITS", 0.0)
    require_memory(artifact, WANTED)
    assert asked_for_bytes(hub)


def test_the_refusal_has_the_sum_and_what_fits_of_the_repository(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, WANTED)
    words = str(refused.value)
    sizes = r"weights 152 kB, a KV cache of 512 tokens 262 kB, scratch [\d.]+ kB"
    assert re.fullmatch(rf"hf:o/n:Q8_0: needs [\d.]+ MB of memory: {sizes}; this machine has 161 kB", words)
    assert refused.value.exit_code == 7
    assert "--anyway" in refused.value.hint


@pytest.mark.parametrize(("less", "named"), [(0.9, "hf:o/n:Q4_0"), (0.1, "no quantization of it fits")])
def test_the_largest_that_fits_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, less: float, named: str) -> None:
    artifact = pinned()
    monkeypatch.setattr("llmrun.backends.fitting.Fit.most_weights", round(less * artifact.size))
    memory(monkeypatch, artifact.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, WANTED)
    assert named in refused.value.hint


def test_a_hub_that_lists_nothing_any_more_leaves_the_refusal(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    hub.faults.append(Fault(on="api", status=500, times=9))
    with pytest.raises(DoesNotFit, match="needs"):
        require_memory(artifact, WANTED)


def test_a_file_of_any_server_has_no_siblings(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = pinned()
    source = UrlSource(f"{hub.url}/o/n/resolve/{here.commit}/m-Q8_0.gguf")
    memory(monkeypatch, here.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(Artifact("m", source, here.files), Wanted("m", (source,)))
    assert "no quantization of it fits" in refused.value.hint


def test_a_wheel_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 1)
    source = PypiSource("p", "1", 5)
    require_memory(Artifact("m", source, (RemoteFile("m.gguf", 5, "0" * 64),)), Wanted("m", (source,)))


@pytest.mark.parametrize(
    ("room", "choice"), [(0, ""), (1 << 20, "toy:1b"), (5 << 19, "toy:1b-q5_0"), (1 << 40, "toy:1b-q8_0")]
)
@pytest.mark.usefixtures("hub")
def test_the_catalogue_names_what_fits_by_the_sizes_that_were_quoted(room: int, choice: str) -> None:
    assert smaller_choice(load_catalog().entry("toy:1b"), room) == choice


def test_a_model_of_the_catalogue_is_told_by_its_name(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    monkeypatch.setattr("llmrun.backends.fitting.Fit.most_weights", 1 << 20)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, load_catalog().find("toy:1b-q8_0"))
    assert refused.value.hint.startswith("the largest that fits is toy:1b;")
