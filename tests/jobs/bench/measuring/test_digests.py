"""Tests that a model file is hashed once, and again whenever it may have changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from llmrun.hub.local.model_records import remember_digests
from llmrun.jobs.bench.measuring import digests
from llmrun.jobs.bench.measuring.digests import file_sha256


class Watching:
    """A reporter that counts the files that were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def note(self, line: str) -> None:
        raise AssertionError(line)

    def progress(self, label: str, done: int, total: int) -> None:
        assert 0 < done <= total
        if done == total:
            self.read.append(label)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_a_file_is_read_once(model: Path) -> None:
    watching = Watching()
    expected = hashlib.sha256(b"weights").hexdigest()
    assert [file_sha256(model, watching) for _ in range(3)] == [expected] * 3
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    assert file_sha256(link, watching) == expected
    assert watching.read == ["hashing model.gguf"]


def test_a_file_that_changed_in_time_size_or_place_is_read_again(model: Path) -> None:
    watching = Watching()
    file_sha256(model, watching)
    os.utime(model, ns=(1, 1))
    file_sha256(model, watching)
    model.write_bytes(b"more weights")
    os.utime(model, ns=(1, 1))
    assert file_sha256(model, watching) == hashlib.sha256(b"more weights").hexdigest()
    other = model.with_name("other")
    other.write_bytes(b"MORE WEIGHTS")
    os.utime(other, ns=(1, 1))
    other.replace(model)
    assert file_sha256(model, watching) == hashlib.sha256(b"MORE WEIGHTS").hexdigest()
    assert len(watching.read) == 4


@pytest.mark.parametrize("damage", ["", "{", "[]", "7", '{"%s": [1]}', '{"%s": ["7", "1", "2", "abc"]}', "[" * 100_000])
def test_a_damaged_memory_is_no_memory(model: Path, damage: str) -> None:
    file_sha256(model, Watching())
    digests._file().write_text(damage.replace("%s", str(model)))
    watching = Watching()
    for _ in range(2):
        assert file_sha256(model, watching) == hashlib.sha256(b"weights").hexdigest()
    assert len(watching.read) == 1


def test_a_false_digest_is_believed_only_for_the_very_file(model: Path) -> None:
    """A cached digest is returned as is, without reading the file."""
    file_sha256(model, Watching())
    table = json.loads(digests._file().read_text())
    table[str(model)][3] = "0" * 64
    digests._file().write_text(json.dumps(table))
    assert file_sha256(model, Watching()) == "0" * 64


def test_without_a_cache_folder_the_file_is_read_each_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    watching = Watching()
    assert [file_sha256(model, watching) for _ in range(2)] == [hashlib.sha256(b"weights").hexdigest()] * 2
    assert len(watching.read) == 2


def test_a_file_that_is_written_while_it_is_read_is_not_remembered(model: Path) -> None:
    class Writing(Watching):
        def progress(self, label: str, done: int, total: int) -> None:
            super().progress(label, done, total)
            os.utime(model, ns=(1, 1))

    file_sha256(model, Writing())
    assert not digests._file().exists()


def test_only_so_many_files_are_remembered_the_latest_hashed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_MOST", 3)
    paths = [model.with_name(f"{number}.gguf") for number in range(5)]
    for path in paths:
        path.write_bytes(b"weights")
        file_sha256(path, Watching())
    assert list(json.loads(digests._file().read_text())) == [str(path) for path in paths[2:]]
    assert [path.name for path in digests._file().parent.iterdir()] == ["sha256.json"]


def test_a_missing_file_is_an_os_error(model: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_sha256(model.with_name("missing.gguf"), Watching())


def test_what_the_hub_hashed_is_not_hashed_again(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    remember_digests([model], ["a" * 64], name="m", source="hf:o/n")
    assert file_sha256(model, Watching()) == "a" * 64
