"""Tests of the entries in the folder of compiled kernels."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmrun.base.compiled.cache import CacheSurvey, KernelCache, survey


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def keep(*keys: str) -> None:
    for key in keys:
        KernelCache().make(key, lambda: b"machine code", threading.Event())


def test_a_folder_that_is_not_there_holds_nothing(folder: Path) -> None:
    assert survey() == CacheSurvey(folder, 0, 0, 0)
    assert not folder.exists()


def test_entries_are_counted_with_their_bytes_and_nothing_else_is(folder: Path) -> None:
    keep("a", "b")
    (folder / ".c").write_bytes(b"a claim")
    assert survey() == CacheSurvey(folder, 2, 0, 2 * (32 + len(b"machine code")))


@pytest.mark.parametrize("flipped", [0, 40])
def test_a_damaged_entry_is_counted_and_stays(folder: Path, flipped: int) -> None:
    keep("a", "b")
    data = bytearray((folder / "b.o").read_bytes())
    data[flipped] ^= 1
    (folder / "b.o").write_bytes(data)
    assert (survey().entries, survey().damaged) == (2, 1)
    assert (folder / "b.o").read_bytes() == data


def test_an_entry_under_another_name_is_damaged(folder: Path) -> None:
    keep("a")
    (folder / "a.o").rename(folder / "b.o")
    assert survey().damaged == 1


def test_a_file_in_the_folders_place_holds_nothing(folder: Path) -> None:
    folder.write_bytes(b"")
    assert survey().entries == 0


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    folder.mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError):
        survey()
