"""Tests of finding folders, and of decoding and replacing users' files."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.base.folders import (
    cache_folder,
    config_file,
    data_folder,
    decoded_text,
    private_folder,
    write_private,
    write_whole,
)


@given(st.text())
def test_texts_are_utf_8_with_or_without_a_byte_order_mark(text: str) -> None:
    data = text.encode("utf-8")
    assert decoded_text(data, "here") == text.removeprefix("\ufeff")
    assert decoded_text(b"\xef\xbb\xbf" + data, "here") == text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_utf_16_gets_a_hint(encoding: str) -> None:
    with pytest.raises(UsageError, match=r"^here: not UTF-8, but UTF-16$") as refused:
        decoded_text("\ufeffHello".encode(encoding), "here")
    assert "Out-File -Encoding utf8" in refused.value.hint


@pytest.mark.parametrize(
    ("data", "byte"), [(b"caf\xe9", "0xe9 at offset 3"), (b"\xef\xbb\xbf\xff", "0xff at offset 3")]
)
def test_other_encodings_are_refused_with_the_byte(data: bytes, byte: str) -> None:
    with pytest.raises(UsageError, match=f"^here: not UTF-8: byte {byte}$"):
        decoded_text(data, "here")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
def test_private_files_are_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "private", []
    path.touch(0o600)
    chmod = Path.chmod

    def noting(partial: Path, mode: int) -> None:
        modes.append(stat.S_IMODE(partial.stat().st_mode))
        chmod(partial, mode)

    monkeypatch.setattr(Path, "chmod", noting)
    for mode in (0o600, 0o640):
        chmod(path, mode)
        write_whole(path, b"secret")
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert modes == [0o600, 0o600]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows always has a home directory")
@pytest.mark.parametrize("find", [config_file, lambda: cache_folder("run"), lambda: data_folder("models")])
def test_a_missing_home_is_one_clear_error(find: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(("LLMRUN_", "XDG_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry in /etc/passwd
    with pytest.raises(UsageError, match=r"^this user has no home directory$") as refused:
        find()
    assert "HOME" in refused.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mode bits")
def test_private_files_and_folders_belong_to_one_user(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "new" / "own")
    assert private_folder(folder) == folder
    secret = folder / "secret"
    secret.symlink_to(tmp_path / "elsewhere")
    write_private(secret, b"1")
    write_private(secret, b"22")
    assert (secret.is_symlink(), secret.read_bytes()) == (False, b"22")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, secret)] == [0o700, 0o600]
    assert [*folder.iterdir()] == [secret]
    assert not (tmp_path / "elsewhere").exists()
    folder.chmod(0o750)
    with pytest.raises(UsageError, match=r"other users may access it \(mode 0750\)"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="not a folder, or a link to one"):
        private_folder(tmp_path / "link")
