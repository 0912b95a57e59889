"""Tests that new files never replace others, and that those of killed processes are removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.base.errors import DoesNotFit, UsageError
from llmrun.hub.local import safe_writes
from llmrun.jobs.batching.journal import absent_file
from tests.support.cli.commands import ROOT

_WAITS = """
import sys, time
from pathlib import Path
from llmrun.jobs.batching.journal import absent_file
with absent_file(Path(sys.argv[1])) as file:
    file.write(b"begun")
    print("begun", flush=True)
    time.sleep(600)
"""


def write(path: Path) -> None:
    with absent_file(path) as file:
        file.write(b"new")


def waiting(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that never finishes writing a file."""
    process = subprocess.Popen([sys.executable, "-c", _WAITS, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


def test_files_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    out, other = tmp_path / "out.gguf", tmp_path / ".other.gguf.llmrun-0123456789abcdef"
    other.write_text("not ours")
    process = waiting(out)
    assert len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "out.gguf")
    assert len(list(tmp_path.iterdir())) == 3  # the file of the process that still runs is kept
    out.unlink()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    write(out)
    assert sorted(tmp_path.iterdir()) == [other, out]


def test_existing_files_and_links_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="already exists"):
            write(tmp_path / name)
    with pytest.raises(UsageError, match="already exists"), absent_file(tmp_path / "late"):
        (tmp_path / "late").write_text("mine")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "late"}
    assert (tmp_path / "late").read_text() == "mine"


def test_missing_folders_get_a_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder") as caught:
        write(tmp_path / "a b" / "file")
    assert caught.value.hint == f"create it: mkdir -p '{tmp_path}/a b'"


def test_small_disks_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFit, match="out needs 1,000,000,000,000,000 bytes plus"):
        absent_file(tmp_path / "out", 10**15).__enter__()
    monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
    write(tmp_path / "size unknown")
    assert [path.name for path in tmp_path.iterdir()] == ["size unknown"]
