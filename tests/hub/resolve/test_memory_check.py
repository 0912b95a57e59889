"""Tests that a model too large for this machine is refused before the download, with numbers and an alternative."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.llama.kind import LlamaGpus
from llmrun.base.errors import DoesNotFit
from llmrun.base.machine import memory as memory_module
from llmrun.hub.catalog import CatalogEntry, Wanted, load_catalog
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.remote import huggingface
from llmrun.hub.remote.model_headers import read_header
from llmrun.hub.resolve.memory_check import require_memory, smaller_choice
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.fake_hub import FakeHub, fake_hub
from tests.support.hub.hub_client import at_hub

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
    monkeypatch.setattr(memory_module, "whole_memory", lambda: n_bytes)


def asked_for_bytes(hub: FakeHub) -> bool:
    return any(asked.method == "GET" for asked in hub.asked if asked.at != "api")


def test_what_is_small_beside_the_memory_is_not_looked_at(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    for n_bytes in (2 * artifact.size, None):
        memory(monkeypatch, n_bytes)
        require_memory(artifact, WANTED, Silent())
    assert not asked_for_bytes(hub)


def test_what_fits_closely_is_let_through_by_its_header(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, 100 * artifact.size)
    monkeypatch.setattr("llmrun.hub.resolve.memory_check._SURELY_FITS", 0.0)
    require_memory(artifact, WANTED, Silent())
    assert asked_for_bytes(hub)


def test_the_refusal_has_the_sum_and_what_fits_of_the_repository(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, WANTED, Silent())
    words = str(refused.value)
    sizes = r"weights 152 kB, KV cache of 512 tokens 147 kB, scratch [\d.]+ kB"
    assert re.fullmatch(rf"hf:o/n:Q8_0: needs [\d.]+ MB of memory \({sizes}\), but this machine has 161 kB", words)
    assert refused.value.exit_code == 7
    assert "--anyway" in refused.value.hint


def test_the_memory_of_rpc_servers_counts(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has room for a model whose layers are all on the server, but not for its layers."""
    servers = [{"description": "box:1", "free": 8 << 30, "total": 8 << 30}]
    artifact = pinned()
    monkeypatch.setattr("llmrun.hub.resolve.memory_check._SURELY_FITS", 0.0)
    with read_header(artifact) as file:
        memory(monkeypatch, fit_of(file, Resources(None, servers)).needed)
    asked: list[OpenOptions] = []

    def gpus(self: LlamaGpus, options: OpenOptions) -> list[dict[str, Any]]:
        asked.append(options)
        return servers if options.rpc else []

    monkeypatch.setattr(LlamaGpus, "memory", gpus)
    with pytest.raises(DoesNotFit):
        require_memory(artifact, WANTED, Silent(), OpenOptions())
    require_memory(artifact, WANTED, Silent(), OpenOptions(rpc="box:1"))
    assert [options.rpc for options in asked] == ["", "box:1"]


def test_the_hint_lists_the_quantizations_of_a_repository(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, WANTED, Silent())
    assert refused.value.hint.startswith("`llmrun fit hf:o/n` shows which quantizations fit;")


def test_a_file_of_any_server_has_no_siblings(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = pinned()
    source = UrlSource(f"{hub.url}/o/n/resolve/{here.commit}/m-Q8_0.gguf")
    memory(monkeypatch, here.size)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(Artifact("m", source, here.files), Wanted("m", (source,)), Silent())
    assert refused.value.hint.startswith("choose a smaller model;")


def test_a_wheel_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 1)
    source = PypiSource("p", "1", 5)
    require_memory(Artifact("m", source, (RemoteFile("m.gguf", 5, "0" * 64),)), Wanted("m", (source,)), Silent())


@pytest.mark.parametrize(
    ("room", "choice"),
    [(0, ""), (1 << 20, ""), (9 << 17, "toy:1b"), (5 << 19, "toy:1b-q5_0"), (1 << 40, "toy:1b-q8_0")],
)
@pytest.mark.usefixtures("hub")
def test_the_catalogue_names_what_fits_by_the_sizes_that_were_quoted(room: int, choice: str) -> None:
    assert smaller_choice(load_catalog().entry("toy:1b"), room) == choice


def test_a_model_of_the_catalogue_is_told_by_its_name(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = pinned()
    memory(monkeypatch, artifact.size)
    rooms: list[int] = []

    def chosen(entry: CatalogEntry, most_bytes: int) -> str:
        rooms.append(most_bytes)
        return f"{entry.name}-smaller"

    monkeypatch.setattr("llmrun.hub.resolve.memory_check.smaller_choice", chosen)
    with pytest.raises(DoesNotFit) as refused:
        require_memory(artifact, load_catalog().find("toy:1b-q8_0"), Silent())
    assert refused.value.hint.startswith("the largest that fits is toy:1b-smaller;")
    with read_header(artifact) as file:
        found = fit_of(file, Resources(None))
    assert rooms == [artifact.size - (found.needed - found.footprint.weights)]


def test_what_would_be_read_from_the_disk_is_a_note(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """llama.cpp maps the file, because our own engine does not support the architecture."""
    path = tiny_llama(tmp_path / "other.gguf", layers=4, extra={"tokenizer.ggml.model": "plamo2"})
    hub.add("o/other", {"m-Q8_0.gguf": path.read_bytes()})
    artifact = huggingface.pin(HubSource("o/other", "m-Q8_0.gguf"), (), name="m")
    with read_header(artifact) as file:
        found = fit_of(file, Resources(None))
    memory(monkeypatch, found.needed - 1)
    monkeypatch.setattr("llmrun.hub.resolve.memory_check._SURELY_FITS", 0.0)
    told: list[str] = []

    class Listening(Silent):
        def note(self, line: str) -> None:
            told.append(line)

    require_memory(artifact, WANTED, Listening())
    assert len(told) == 1
    assert "from disk" in told[0]
