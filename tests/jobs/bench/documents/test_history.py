"""Tests of the measurement history: concurrent writers, damage, and lookup by a short prefix."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.bench.documents import history
from llmrun.jobs.bench.documents.document import FORMAT
from llmrun.jobs.bench.documents.history import find, history_file, load_history, save
from tests.support.bench.stored_documents import document

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_nothing_was_measured_yet() -> None:
    assert load_history() == history.History(())
    with pytest.raises(UsageError, match="no runs are saved"):
        find("last", load_history().documents)


def test_runs_come_back_in_the_order_they_were_saved() -> None:
    runs = tuple(document(identity=name) for name in "abc")
    for run in runs:
        save(run)
    assert load_history() == history.History(runs)


@pytest.mark.push
def test_parallel_writers_lose_nothing(folder: Path) -> None:
    program = """
import sys
from llmrun.jobs.bench.documents.history import save
from tests.support.bench.stored_documents import document
for number in range(15):
    save(document(identity=f"{sys.argv[1]}-{number}"))
"""
    environment = os.environ | {"LLMRUN_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([sys.executable, "-c", program, name], env=environment, cwd=ROOT) for name in "abcd"]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    loaded = load_history()
    assert loaded.damaged == 0
    assert sorted(run.identity for run in loaded.documents) == sorted(
        f"{name}-{number}" for name in "abcd" for number in range(15)
    )


def test_damaged_lines_are_counted_and_the_others_read() -> None:
    save(document(identity="first"))
    with history_file().open("ab") as file:
        file.write(b'{"format": 1}\n\xff\xfe\n\n' + f'{{"format": {FORMAT + 1}}}\n'.encode() + b'{"format": 1, "iden')
    save(document(identity="second"))
    loaded = load_history()
    assert [run.identity for run in loaded.documents] == ["first", "second"]
    assert loaded.damaged == 4


def test_a_full_disk_is_one_line_and_the_file_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    save(document(identity="first"))
    before = history_file().read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LlmrunError, match=r"history: .*history.jsonl: cannot be written: the disk is full"):
        save(document(identity="second"))
    assert history_file().read_bytes() == before


def test_a_folder_that_cannot_be_written_is_one_line(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(LlmrunError, match="cannot be written") as caught:
        save(document())
    assert "LLMRUN_DATA_DIR" in caught.value.hint


def test_a_history_that_cannot_be_read_is_one_line() -> None:
    history_file().mkdir(parents=True)
    with pytest.raises(LlmrunError, match="cannot be read"):
        load_history()


RUNS = [document(identity=name) for name in ("abc-1", "abd-2", "abd", "last-one", "abc-1")]


@pytest.mark.parametrize(
    ("reference", "index"),
    [("last", 4), ("last~0", 4), ("last~2", 2), ("last~4", 0), ("abd", 2), ("abd-", 1), ("abc", 4), ("last-", 3)],
)
def test_a_run_is_found_by_its_name_or_its_place(reference: str, index: int) -> None:
    assert find(reference, RUNS) is RUNS[index]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("last~5", "last~5: only 5 runs saved"),
        ("ab", "'ab': matches 3 runs: abc-1, abd-2, abd"),
        ("x", "'x': no such run"),
        ("", "'': no such run"),
        ("last~-1", "'last~-1': no such run"),
        ("last~99999999999", "'last~99999999999': no such run"),
    ],
)
def test_a_reference_to_nothing_is_refused(reference: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(reference, RUNS)
    assert str(caught.value) == f"history: {message}"
