"""Tests that system errors become one sentence, and that writers wait for each other."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import filelock
import pytest

from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.hub.local import safe_writes
from llmrun.hub.local.safe_writes import digest, make_folder, put_in_place, require_space, sync_folder, writing
from llmrun.hub.transfer.pypi import lock_held
from tests.support.hub.fetching import Said


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, DoesNotFit, "full, "),
        (errno.EDQUOT, DoesNotFit, "full, "),
        (errno.EFBIG, DoesNotFit, "too large for this file system"),
        (errno.EROFS, LlmrunError, "cannot be written: Read-only file system"),
        (errno.EACCES, LlmrunError, "cannot be written: Permission denied"),
    ],
)
def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path, code: int, kind: type[LlmrunError], words: str) -> None:
    with pytest.raises(LlmrunError) as caught, writing(tmp_path / "x"):
        raise OSError(code, os.strerror(code))
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.hint


def test_a_reader_that_has_gone_is_not_taken_for_the_disk(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), writing(tmp_path / "x"):
        raise BrokenPipeError


def test_how_much_is_free_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    with pytest.raises(DoesNotFit, match=r"free space unknown \(Input/output error\)"), writing(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "full")


def test_room_is_looked_for_where_the_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_space(tmp_path / "not" / "yet", 1, "it")
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    require_space(tmp_path / "not" / "yet", 0, "it")
    with pytest.raises(DoesNotFit, match="it needs 1 bytes"):
        require_space(tmp_path / "not" / "yet", 1, "it")


def test_windows_has_no_folders_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_folder(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    sync_folder(tmp_path / "none")


def test_a_file_is_put_in_the_place_of_a_link_not_through_it(tmp_path: Path) -> None:
    victim, new, final = tmp_path / "victim", tmp_path / "new", tmp_path / "final"
    victim.write_text("mine")
    new.write_text("new")
    final.symlink_to(victim)
    put_in_place(new, final)
    assert (victim.read_text(), final.read_text(), final.is_symlink()) == ("mine", "new", False)


def test_a_file_that_grows_while_it_is_read_is_told_within_its_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    said = Said()
    assert digest(tmp_path / "x", said, "checking") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert said.steps == [("checking", 3, 3)]


def test_a_lock_is_waited_for_with_a_word(tmp_path: Path) -> None:
    lock, words = tmp_path / "locks" / "x", []

    def let_go() -> None:
        words.append("waiting")
        other.release()

    make_folder(lock.parent, tmp_path)
    other = filelock.FileLock(lock)
    with other, lock_held(lock, tmp_path, let_go):
        assert words == ["waiting"]
    with lock_held(lock, tmp_path, let_go):
        pass
    assert words == ["waiting"]


def test_a_network_folder_without_locks_gets_the_softer_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    with lock_held(tmp_path / "x.lock", tmp_path, lambda: None), pytest.raises(filelock.Timeout):
        filelock.SoftFileLock(tmp_path / "x.lock").acquire(timeout=0)
    assert not (tmp_path / "x.lock").exists()
