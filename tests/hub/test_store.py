"""What counts as present, and what it costs to know."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.hub import store
from llmrun.hub.catalog import CatalogEntry, HubSource
from llmrun.hub.transfer import save_verified
from tests.support.fake_hub import MODEL, SHA256

ENTRY = CatalogEntry(
    name="tiny",
    description="a model made for a test",
    license="MIT",
    parameters=1,
    quantization="F16",
    file="model.gguf",
    size=len(MODEL),
    sha256=SHA256,
    sources=(HubSource("good/repo", "model.gguf"),),
)


class Collected:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.labels: set[str] = set()

    def note(self, line: str) -> None:
        self.notes.append(line)

    def progress(self, label: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.labels.add(label)


@pytest.fixture
def said() -> Collected:
    return Collected()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model, whole, in the data folder of this test."""
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    path = store.model_path(ENTRY)
    path.parent.mkdir(parents=True)
    path.write_bytes(MODEL)
    return path


def test_a_file_without_a_record_is_hashed_once(model: Path, said: Collected) -> None:
    assert store.find(ENTRY, said) == model
    assert said.labels == {"checking tiny"}
    said.labels.clear()
    assert store.find(ENTRY, said) == model
    assert said.labels == set()


def test_a_file_that_changed_is_hashed_again_and_refused(model: Path, said: Collected) -> None:
    assert store.find(ENTRY, said) == model
    model.write_bytes(MODEL[:-1] + b"?")
    os.utime(model, (1, 1))
    assert store.find(ENTRY, said) is None
    assert "damaged: sha256" in said.notes[0]
    assert not model.exists()


def test_a_file_of_another_size_is_not_the_model(model: Path, said: Collected) -> None:
    model.write_bytes(MODEL[:-1])
    assert store.find(ENTRY, said) is None
    assert (said.notes, said.labels) == ([], set())


def test_a_record_that_cannot_be_written_costs_a_check_only(model: Path, said: Collected) -> None:
    (model.parent / ".verified").write_text("a file where the folder should be")
    assert store.find(ENTRY, said) == model
    assert store.find(ENTRY, said) == model
    assert said.notes == []


def test_a_folder_or_a_dangling_link_of_that_name_is_not_the_model(model: Path, said: Collected) -> None:
    model.unlink()
    model.mkdir()
    snapshot = store.repository_folder(HubSource("good/repo", "model.gguf")) / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.gguf").symlink_to("nowhere")
    assert store.find(ENTRY, said) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"HF_HOME": "$PLACE/b"}, "/there/b/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, "/home/someone/.cache/huggingface/hub"),
    ],
)
def test_the_shared_cache_is_where_huggingface_hub_has_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    import subprocess
    import sys

    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", "PLACE": "/there", **variables}.items():
        monkeypatch.setenv(name, value)
    assert store.hub_cache() == Path(expected)
    theirs = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    assert subprocess.check_output([sys.executable, "-c", theirs], text=True).strip() == expected


def failing(code: int) -> Iterator[bytes]:
    yield MODEL[:1000]
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, DoesNotFit), (errno.EDQUOT, DoesNotFit), (errno.EROFS, LlmrunError), (errno.EIO, LlmrunError)],
)
def test_a_disk_that_refuses_is_one_sentence_and_nothing_is_kept(
    tmp_path: Path, said: Collected, code: int, kind: type[LlmrunError]
) -> None:
    partial, final = tmp_path / "partial", tmp_path / "final"
    with pytest.raises(LlmrunError) as caught:
        save_verified(failing(code), ENTRY, partial, final, said, "downloading tiny")
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_leaves_the_file_that_was_there(tmp_path: Path, said: Collected) -> None:
    final = tmp_path / "final"
    final.write_bytes(b"before")
    with pytest.raises(LlmrunError):
        save_verified(iter([b"wrong"]), ENTRY, tmp_path / "partial", final, said, "downloading tiny")
    assert final.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [final]
