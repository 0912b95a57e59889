"""Tests of API key files and of the comparison of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import UsageError
from llmrun.serving.gate import ApiKeys, kept_secret, others_can_read, read_keys, read_upstream_keys
from tests.support.hub.small_disks import mounted_disk

KEY = "0123456789abcdef"


def key_file(folder: Path, content: bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_file_has_one_key_per_line(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"# alice\n{KEY}\n\n  {KEY}-2  \r\n#{KEY}-3\n".encode())
    assert read_keys(path) == (KEY, f"{KEY}-2")


def test_a_byte_order_mark_is_not_part_of_a_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"\ufeff{KEY}\r\n".encode())
    assert read_keys(path) == (KEY,)
    assert read_upstream_keys(path, BASES) == dict.fromkeys(BASES, KEY)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "contains no keys"),
        (b"# nothing\n\n", "contains no keys"),
        (b"short\n", "line 1: shorter than 16 characters"),
        (f"{KEY}\nwith spaces in it\n".encode(), "line 2: a key must be printable ASCII"),
        ("kéy-kéy-kéy-kéy-kéy\n".encode(), "printable ASCII"),
        (b"\xfe" * 40, "not UTF-8: byte 0xfe at offset 0"),
        (f"{KEY}\n".encode("utf-16"), "not UTF-8, but UTF-16"),
    ],
)
def test_bad_key_files_are_refused_without_showing_keys(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        read_keys(key_file(tmp_path, content))
    assert "short\n" not in str(refused.value)
    assert KEY not in str(refused.value)


BASES = ("http://one:8080/v1", "https://two/v1")


def test_upstreams_have_one_key_or_one_each(tmp_path: Path) -> None:
    assert read_upstream_keys(key_file(tmp_path, b"# all\nsecret\n"), BASES) == dict.fromkeys(BASES, "secret")
    own = key_file(tmp_path, b"common\nhttps://two  mine\n")
    assert read_upstream_keys(own, BASES) == {BASES[0]: "common", BASES[1]: "mine"}
    assert read_upstream_keys(key_file(tmp_path, b"http://one:8080/v1 mine\n"), BASES) == {BASES[0]: "mine"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"http://three secret-key\n", "line 1: http://three/v1 is not an upstream"),
        (b"http://one:8080\n", "line 1: a URL without a key"),
        (b"common\nhttp://one:8080 k\xc3\xa9y\n", "line 2: a key must be printable ASCII"),
        (b"\xff\xfe", "not UTF-8, but UTF-16"),
    ],
)
def test_bad_keys_of_upstreams_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        read_upstream_keys(key_file(tmp_path, content), BASES)
    assert "secret-key" not in str(refused.value)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--api-key-file: .*nothing: No such file"):
        read_keys(tmp_path / "nothing")


def test_files_that_others_can_read_are_noticed(tmp_path: Path) -> None:
    path = key_file(tmp_path, KEY.encode())
    assert not others_can_read(path)
    path.chmod(0o644)
    assert others_can_read(path)


def test_keys_are_compared_as_a_whole() -> None:
    keys = ApiKeys((KEY, f"{KEY}-2"))
    assert keys.accept(KEY)
    assert keys.accept(f"{KEY}-2")
    assert not any(keys.accept(wrong) for wrong in ("", KEY[:-1], f"{KEY}-", KEY.upper(), "\udcff"))


def test_tenants_differ_between_servers() -> None:
    """Nobody can compute another user's tenant from a key alone."""
    assert ApiKeys((KEY,)).tenant(KEY) != ApiKeys((KEY,)).tenant(KEY)


def test_a_folder_keeps_one_private_secret(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    secret = kept_secret(folder)
    assert len(secret) == 32
    assert kept_secret(folder) == secret
    assert [(path.name, path.stat().st_mode & 0o777) for path in folder.iterdir()] == [("secret", 0o600)]


def test_a_secret_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 64 << 10, room=0) as disk:
        with pytest.raises(UsageError, match=f"^--save-prefixes: {disk.folder}/secret: No space left on device$"):
            kept_secret(disk.folder)
        assert [path.name for path in disk.folder.iterdir()] == ["ballast"]
