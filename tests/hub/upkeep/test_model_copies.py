"""Tests of models that other machines have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmrun.base.errors import DoesNotFit, IntegrityError, LlmrunError
from llmrun.hub.local import paths, safe_writes
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.upkeep.inventory import models, select
from llmrun.hub.upkeep.model_copies import IncomingModel, OriginalFile, find_copy, originals
from llmrun.hub.upkeep.removal import partials, removal_of, remove

DATA = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


class Labels(Silent):
    """A reporter that keeps the labels of progress."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def progress(self, label: str, done: int, total: int) -> None:
        self.seen.add(label)


def elsewhere(data: bytes = DATA, name: str = "model.gguf") -> list[OriginalFile]:
    return [OriginalFile(f"/no/such/folder/{name}", len(data), hashlib.sha256(data).hexdigest())]


def receive(files: Sequence[OriginalFile], data: bytes = DATA) -> Path:
    incoming = IncomingModel(files)
    assert incoming.take()
    try:
        for index in range(len(files)):
            incoming.write(data[incoming.begin(index) :])
            incoming.end(Silent())
        return incoming.finish()
    finally:
        incoming.close()


def test_files_are_hashed_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    first, second = Labels(), Labels()
    assert originals(path, first) == [OriginalFile(str(path), len(DATA), hashlib.sha256(DATA).hexdigest())]
    assert originals(path, second) == originals(path, first)
    assert (first.seen, second.seen) == ({"hashing model.gguf"}, set())
    with pytest.raises(LlmrunError, match="cannot be read: No such file"):
        originals(tmp_path / "nothing.gguf", Silent())


def test_a_shared_folder_is_used(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    files = originals(path, Silent())
    assert find_copy(files, Silent()) == path
    path.write_bytes(DATA[::-1])
    os.utime(path, (1, 1))  # a record has whole seconds
    assert find_copy(files, Silent()) is None


def test_a_model_under_another_name_is_found() -> None:
    own = paths.own_model("another.gguf")
    own.parent.mkdir(parents=True)
    own.write_bytes(DATA)
    assert find_copy(elsewhere(), Silent()) == own
    assert find_copy(elsewhere(DATA[:-1] + b"x"), Silent()) is None
    assert find_copy(elsewhere(DATA[:-1]), Silent()) is None


def test_a_received_model_is_verified_listed_and_removed() -> None:
    files = elsewhere()
    path = receive(files)
    assert path == paths.received_file(files[0].sha256, "model.gguf")
    assert path.read_bytes() == DATA
    assert known_digest(path) == files[0].sha256
    assert find_copy(files, Silent()) == path
    assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf"]
    remove(removal_of(select(str(path), models())))
    assert find_copy(files, Silent()) is None


def test_an_interrupted_transfer_resumes() -> None:
    files = elsewhere()
    first = IncomingModel(files)
    assert first.take()
    assert not IncomingModel(files).take()
    assert first.begin(0) == 0
    first.write(DATA[:1000])
    first.close()
    assert [(partial.done, partial.total) for partial in partials()] == [(1000, len(DATA))]
    second = IncomingModel(files)
    assert second.take()
    assert second.begin(0) == 1000
    second.write(DATA[1000:])
    second.end(Silent())
    assert second.finish().read_bytes() == DATA
    assert partials() == []


def test_damaged_bytes_are_not_kept() -> None:
    files = elsewhere()
    with pytest.raises(IntegrityError, match=r"model\.gguf: its sha256 is"):
        receive(files, DATA[:-1] + b"x")
    assert find_copy(files, Silent()) is None
    assert receive(files).read_bytes() == DATA


def test_shards_are_received_into_one_folder() -> None:
    shards = [*elsewhere(name="m-00001-of-00002.gguf"), *elsewhere(name="m-00002-of-00002.gguf")]
    first = receive(shards)
    assert [entry.name for entry in sorted(first.parent.iterdir())] == [file.name for file in shards]
    assert find_copy(shards, Silent()) == first


def test_a_full_disk_is_noticed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 62)
    with pytest.raises(DoesNotFit, match=r"model\.gguf needs"):
        IncomingModel(elsewhere()).take()


@pytest.mark.parametrize("name", ["..", "a\\b", ""])
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(LlmrunError):
        IncomingModel([OriginalFile(name, 1, "0" * 64)])
