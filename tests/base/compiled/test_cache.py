"""Tests of the entries in the folder of compiled kernels."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from llmrun.base.compiled.cache import CacheSurvey, KernelCache, survey, unused_files


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


DAY = 86_400
OLD, NEW = "0" * 64, "1" * 64


def age(path: Path, days: float) -> Path:
    """Give a file an age, which for a kernel is the time since its last use."""
    made = time.time() - days * DAY
    os.utime(path, (made, made))
    return path


def test_files_unused_for_a_month_are_found(folder: Path) -> None:
    """Files with other names are not ours. Killed compilers leave files whose names begin with a dot."""
    keep(OLD, NEW)
    old = age(folder / f"{OLD}.o", 31)
    age(folder / f"{NEW}.o", 29)
    left = [folder / f".{OLD}", folder / f".{OLD}.123"]
    for path in (*left, folder / "notes.o", folder / ".keep"):
        path.write_bytes(b"12345")
        age(path, 31)
    (folder / f"{'2' * 64}.o").mkdir()
    age(folder / f"{'2' * 64}.o", 31)
    assert unused_files(time.time()) == [(left[0], 5), (left[1], 5), (old, 32 + len(b"machine code"))]


def test_reading_a_kernel_counts_as_use(folder: Path) -> None:
    keep(OLD)
    age(folder / f"{OLD}.o", 31)
    assert KernelCache().read(OLD) == b"machine code"
    assert unused_files(time.time()) == []


def test_surveying_kernels_does_not_count_as_use(folder: Path) -> None:
    keep(OLD)
    age(folder / f"{OLD}.o", 31)
    assert survey().entries == 1
    assert len(unused_files(time.time())) == 1


def test_uses_are_recorded_at_most_once_a_day(folder: Path) -> None:
    keep(OLD)
    made = age(folder / f"{OLD}.o", 0.9).stat().st_mtime
    KernelCache().read(OLD)
    assert (folder / f"{OLD}.o").stat().st_mtime == made


def test_a_use_that_cannot_be_recorded_is_not_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(OLD)
    age(folder / f"{OLD}.o", 31)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    cache = KernelCache()
    assert cache.read(OLD) == b"machine code"
    assert not cache.damaged


@pytest.mark.parametrize("is_file", [False, True])
def test_without_a_folder_no_file_is_unused(folder: Path, is_file: bool) -> None:
    if is_file:
        folder.write_bytes(b"")
    assert unused_files(time.time()) == []
