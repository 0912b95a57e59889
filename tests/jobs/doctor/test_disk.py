"""Tests of a folder's size and whether it is writable, without leaving anything in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from llmrun.jobs.doctor import folders
from llmrun.jobs.doctor.folders import can_write, shown_path, use_of


def test_files_are_counted_below_a_folder_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/one").write_bytes(bytes(1000))
    (tmp_path / "two").write_bytes(bytes(500))
    (tmp_path / "a/link").symlink_to(tmp_path / "two")
    use = use_of(tmp_path)
    assert (use.files, use.whole) == (3, True)
    assert 1500 <= use.n_bytes < 1500 + 500
    assert use.free is not None
    assert use.free > 0


def test_a_folder_that_is_not_there_holds_nothing_and_has_its_disks_room(tmp_path: Path) -> None:
    use = use_of(tmp_path / "no/such")
    assert (use.files, use.n_bytes, use.whole) == (0, 0, True)
    assert use.free
    assert can_write(tmp_path / "no/such")
    assert list(tmp_path.iterdir()) == []


def test_very_many_files_are_not_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"1")
    monkeypatch.setattr(folders, "_MOST_FILES", 3)
    use = use_of(tmp_path)
    assert (use.files, use.n_bytes, use.whole) == (3, 3, False)


def test_a_disk_that_tells_nothing_has_no_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    assert use_of(tmp_path).free is None


def test_a_folder_is_writable_when_a_file_can_be_made_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_write(tmp_path)

    def fail(**arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    assert not can_write(tmp_path)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_a_file_in_the_folders_place_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not can_write(tmp_path / "file")


def test_a_path_below_the_home_folder_is_shown_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shown_path(tmp_path / "a/b") == "~/a/b"
    assert shown_path(Path("/elsewhere")) == "/elsewhere"
