"""Tests that a file changed while it is read ends in a one-line error, at any moment and by any change."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.errors import LlmrunError, ModelFileError
from llmrun.formats.gguf import cursor
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.gguf.source import FileSource
from tests.support.gguf.gguf_files import tiny_llama

CHANGED = "the model file changed while it was being read"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf", weight_type="Q4_1", tied=False, rope_scaling="llama3")


def cut_off(path: Path) -> None:
    os.truncate(path, 100)


def write_into(path: Path) -> None:
    """Overwrite part of the file without changing its size."""
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, 0))  # independent of the resolution of the file system's clock


def replace_by_another(path: Path) -> None:
    """Replace the file by another, as a finished download does."""
    other = path.with_suffix(".part")
    other.write_bytes(b"another file")
    other.replace(path)


def load(path: Path) -> None:
    with open_gguf(path) as file:
        CpuBackend(file, OpenOptions(context_size=64, threads=2)).close()


def load_with_trouble(path: Path, at_read: int, trouble: Callable[[Path], None]) -> int:
    """Load the model, with `trouble` striking just before read number `at_read`; return the number of reads."""
    numbers = itertools.count()  # atomic, because threads read at the same time
    read = FileSource.read

    def counted(self: FileSource, offset: int, into: memoryview) -> None:
        if next(numbers) == at_read:
            trouble(path)
        read(self, offset, into)

    with mock.patch.object(FileSource, "read", counted):
        load(path)
    return next(numbers)


@pytest.mark.push
def test_a_file_cut_off_before_any_of_its_reads_says_what_happened(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursor, "_WINDOW_STEP", 1000)  # read the header in several steps
    whole = model.read_bytes()
    n = load_with_trouble(model, -1, cut_off)
    assert n > 25
    for at_read in range(n):
        model.write_bytes(whole)
        with pytest.raises(ModelFileError) as caught:
            load_with_trouble(model, at_read, cut_off)
        assert str(caught.value) == f"{CHANGED}: {model}: was {len(whole)} bytes, is 100"


@pytest.mark.push
def test_a_file_written_to_before_any_of_its_reads_is_not_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "_WINDOW_STEP", 1000)
    n = load_with_trouble(model, -1, write_into)
    for at_read in range(n):
        os.utime(model)
        with pytest.raises(ModelFileError, match=f"{CHANGED}: .*: it was written to"):
            load_with_trouble(model, at_read, write_into)


def test_a_copy_that_is_still_under_way_is_not_called_broken(model: Path) -> None:
    def overwrite(path: Path) -> None:
        path.write_bytes(b"GGUF" + bytes(100))

    with pytest.raises(ModelFileError, match=f"{CHANGED}: .*, is 104"):
        load_with_trouble(model, 0, overwrite)


@pytest.mark.push
def test_a_file_replaced_by_another_of_its_name_goes_on_as_it_was(model: Path) -> None:
    whole = model.read_bytes()
    n = load_with_trouble(model, -1, replace_by_another)
    for at_read in range(n):
        model.write_bytes(whole)
        assert load_with_trouble(model, at_read, replace_by_another) == n
        assert model.read_bytes() == b"another file"


@pytest.mark.parametrize(
    ("trouble", "what"),
    [
        (cut_off, "is 100$"),
        (write_into, "it was written to$"),
        (replace_by_another, "it was replaced by another file$"),
        (Path.unlink, "No such file or directory$"),
    ],
)
def test_whoever_opens_the_path_once_more_is_told_that_it_is_another_file(
    model: Path, trouble: Callable[[Path], None], what: str
) -> None:
    with open_gguf(model) as file:
        file.check_in_place()
        trouble(model)
        with pytest.raises(ModelFileError, match=f"{CHANGED}: {model}: .*{what}"):
            file.check_in_place()


@pytest.mark.push
@pytest.mark.parametrize("trouble", [cut_off, write_into])
def test_a_file_that_changes_after_it_was_loaded_is_nobodys_business(
    model: Path, trouble: Callable[[Path], None]
) -> None:
    with open_gguf(model) as file:
        backend = CpuBackend(file, OpenOptions(context_size=64, threads=2))
    trouble(model)
    backend.close()
    with open_gguf(model) if trouble is write_into else pytest.raises(ModelFileError):
        open_gguf(model).close()


@pytest.mark.push
@pytest.mark.parametrize("at_read", [0, 10, 20])
def test_the_command_ends_in_one_line_and_exit_code_3(model: Path, at_read: int) -> None:
    program = f"""
import os
from llmrun.formats.gguf.source import FileSource
from llmrun.__main__ import main

reads, read = [], FileSource.read

def counted(self, offset, into):
    reads.append(offset)
    if len(reads) == {at_read + 1}:
        os.truncate({str(model)!r}, 100)
    read(self, offset, into)

FileSource.read = counted
main()
"""
    command = [sys.executable, "-c", program, "generate", "-m", str(model), "--backend", "cpu", "--raw", "-n", "1", "a"]
    size = model.stat().st_size
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    error, hint = done.stderr.splitlines()
    assert error == f"error: {CHANGED}: {model}: was {size} bytes, is 100"
    assert hint.startswith("hint: ")


def test_a_disk_that_fails_is_said_with_the_place(model: Path) -> None:
    with open_gguf(model) as file:
        tensor = file.tensors["output.weight"]
        with (
            mock.patch.object(os, "preadv", side_effect=OSError(5, "Input/output error")),
            pytest.raises(ModelFileError, match=f"at byte {tensor.offset}: Input/output error"),
        ):
            file.read(tensor)


# File descriptors


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - Path.iterdir would have it closed before it is counted


@pytest.mark.night
def test_a_hundred_opens_leave_no_descriptor_open(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-64])
    gc.collect()
    before = open_descriptors()
    for _ in range(100):
        with open_gguf(model) as file:
            assert open_descriptors() == before + 1
            file.read(file.tensors["output.weight"])
        forgotten = open_gguf(model)
        del forgotten
        with pytest.raises(LlmrunError) as kept:
            open_gguf(broken)
        assert kept.value.__traceback__ is not None  # the traceback keeps everything alive except the file
        assert open_descriptors() == before
    gc.collect()
    assert open_descriptors() == before


def test_closing_twice_is_closing_once(model: Path) -> None:
    file = open_gguf(model)
    file.close()
    file.close()


# Reading


@pytest.mark.push
@pytest.mark.parametrize("system", [sys.platform, "win32"])
def test_threads_read_side_by_side_each_its_own_bytes(
    model: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has no preadv, and all threads share one file position there."""
    monkeypatch.setattr(sys, "platform", system)
    if system == "win32":
        monkeypatch.delattr(os, "preadv", raising=False)
    data = np.frombuffer(model.read_bytes(), np.uint8)
    source = FileSource(model)

    def read_everywhere(seed: int) -> None:
        for start, length in np.random.default_rng(seed).integers(0, len(data) // 2, (200, 2)).tolist():
            into = np.zeros(length, np.uint8)
            source.read(start, into.data)
            np.testing.assert_array_equal(into, data[start : start + length])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_everywhere, range(8)))
    source.close()


def test_a_read_that_gives_less_than_was_asked_goes_on(model: Path) -> None:
    """Linux returns at most 2 GiB per read, and a network file system returns what it has."""
    if sys.platform == "win32":
        pytest.skip("needs preadv")
    preadv = os.preadv

    def little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:7]], offset)

    with open_gguf(model) as file:
        tensor = file.tensors["output.weight"]
        expected = file.read(tensor)
        with mock.patch.object(os, "preadv", little):
            np.testing.assert_array_equal(file.read(tensor), expected)
