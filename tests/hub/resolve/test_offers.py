"""Tests of which quantizations of a model are available."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import ModelNotFound, NetworkError
from llmrun.hub.remote.network_errors import Unreachable
from llmrun.hub.resolve.model_file import LocalPath, understand
from llmrun.hub.resolve.offers import offers
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import at_hub

CATALOGUE = """
[models."toy:1b"]
description = "A toy"
license = "MIT"
repository = "o/n"
quants.Q4_K_M = { file = "m-Q4_K_M.gguf" }
quants.Q8_0 = { file = "m-Q8_0.gguf" }
quants.Q6_K = { repository = "other/n", file = "m-Q6_K.gguf" }
quants.Q5_K_M = { file = "gone-Q5_K_M.gguf" }
seen = "here"
"""
FILES = {"m-Q4_K_M.gguf": bytes(44), "m-Q8_0.gguf": bytes(88), "m-F16.gguf": bytes(160)}


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, label: str, done: int, total: int) -> None:
        raise AssertionError("nothing is fetched")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "models.toml").write_text(CATALOGUE)
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        running.add("o/n", FILES)
        running.add("other/n", {"m-Q6_K.gguf": bytes(66)})
        yield running


def names(text: str, notes: Notes | None = None) -> list[str]:
    wanted = understand(text)
    assert not isinstance(wanted, LocalPath)
    return [artifact.name for artifact in offers(wanted, notes or Notes())]


def test_a_model_of_the_catalogue_has_all_its_quantizations_that_are_there_the_smallest_first(hub: FakeHub) -> None:
    assert names("toy:1b") == ["toy:1b", "toy:1b-q6_k", "toy:1b-q8_0"]
    assert [asked.at for asked in hub.asked] == ["api", "api"]  # one request for each repository


def test_each_name_means_that_very_file(hub: FakeHub) -> None:
    assert [names(name) for name in names("toy:1b")[1:]] == [["toy:1b-q6_k"], ["toy:1b-q8_0"]]
    assert [names(name) for name in names("hf:o/n")] == [["hf:o/n:Q4_K_M"], ["hf:o/n:Q8_0"], ["hf:o/n:F16"]]


def test_one_quantization_is_one_offer(hub: FakeHub) -> None:
    assert names("toy:1b-q8_0") == ["toy:1b-q8_0"]
    assert names("hf:o/n:F16") == ["hf:o/n:F16"]
    assert names("hf:o/n/m-F16.gguf") == ["hf:o/n/m-F16.gguf"]


def test_a_repository_offers_what_it_has(hub: FakeHub) -> None:
    assert names("hf:o/n") == ["hf:o/n:Q4_K_M", "hf:o/n:Q8_0", "hf:o/n:F16"]
    hub.add("o/n", FILES | {"other-F16.gguf": bytes(170)})
    assert names("hf:o/n")[2:] == ["hf:o/n/m-F16.gguf", "hf:o/n/other-F16.gguf"]


def test_a_repository_without_a_model_says_so(hub: FakeHub) -> None:
    hub.add("o/empty", {"README.md": b"none"})
    with pytest.raises(ModelNotFound, match="no GGUF model"):
        names("hf:o/empty")


def test_a_repository_that_does_not_answer_is_told_and_the_others_remain(hub: FakeHub) -> None:
    notes = Notes()
    hub.faults.append(Fault(on="api", status=500))
    assert names("toy:1b", notes) == ["toy:1b-q6_k"]
    assert len(notes.lines) == 1
    assert notes.lines[0].startswith("hf:o/n: ")


def test_a_hub_that_is_away_is_an_error(hub: FakeHub) -> None:
    hub.faults.append(Fault(on="api", status=500, times=9))
    hub.faults.append(Fault(on="hub", status=500, times=9))
    with pytest.raises(NetworkError):
        names("toy:1b")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    at_hub(monkeypatch, "http://127.0.0.1:1")
    notes = Notes()
    with pytest.raises(Unreachable, match="Connection refused"):
        names("toy:1b", notes)
    assert notes.lines == []


def test_a_named_quantization_is_the_only_offer_even_if_it_is_the_usual_one(hub: FakeHub) -> None:
    assert names("toy:1b-q4_k_m") == ["toy:1b"]


def test_a_wheel_is_no_quantization_of_its_own(hub: FakeHub) -> None:
    own = Path(os.environ["LLMRUN_CONFIG"]).with_name("models.toml")
    only_wheel = (
        'quants.Q8_0 = { file = "w.gguf", size = 5, sha256 = "' + "0" * 64 + '", pypi = "p==1", wheel_bytes = 9 }'
    )
    own.write_text(CATALOGUE.replace('quants.Q8_0 = { file = "m-Q8_0.gguf" }', only_wheel))
    assert "toy:1b-q8_0" not in names("toy:1b")


def test_a_file_of_another_server_is_no_quantization_of_the_hub(hub: FakeHub) -> None:
    own = Path(os.environ["LLMRUN_CONFIG"]).with_name("models.toml")
    elsewhere = 'quants.Q8_0 = { url = "https://example.org/w.gguf" }'
    own.write_text(CATALOGUE.replace('quants.Q8_0 = { file = "m-Q8_0.gguf" }', elsewhere))
    assert names("toy:1b") == ["toy:1b", "toy:1b-q6_k"]
