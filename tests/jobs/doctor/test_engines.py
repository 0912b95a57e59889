"""Tests of the doctor's report about background engines."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from llmrun.jobs.doctor.engines import look_at_engines
from llmrun.jobs.doctor.examine import NOTE, OK, Finding, Machine
from llmrun.jobs.doctor.folders import all_places
from llmrun.serving.background import place
from llmrun.serving.background.place import open_folder, socket_name
from tests.support.cli.commands import run
from tests.support.serving.fake_engine import started

if sys.platform == "win32":
    pytest.skip("needs Unix sockets", allow_module_level=True)


def found() -> list[Finding]:
    return [*look_at_engines(Machine(offline=True))]


def test_no_engine_is_no_problem(engines: Path) -> None:
    (finding,) = found()
    assert (finding.status, finding.words) == (OK, "no background engine is running")
    assert not engines.exists()


def test_an_unsafe_folder_is_a_note(engines: Path) -> None:
    engines.mkdir(0o755)
    (finding,) = found()
    assert (finding.status, finding.advice) == (NOTE, f"Make it private: chmod 700 {engines}.")


def test_the_runtime_folder_is_among_the_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CACHE_DIR")
    monkeypatch.setattr(place, "_RUNTIME", tmp_path)
    own = tmp_path / str(os.geteuid())
    assert own / "llmrun" not in [each.path for each in all_places()]
    own.mkdir()
    assert own / "llmrun" in [each.path for each in all_places()]


@pytest.mark.push
def test_leftovers_of_a_crash_are_reported_and_pruned(engines: Path) -> None:
    process = started("one")
    assert [each.words for each in found()] == ["tiny: idle"]
    process.kill()
    process.wait()
    log = engines / f"{socket_name('one')}.log"
    log.write_text("MemoryError: 5 GB\n")
    _, finding = found()
    assert (finding.status, finding.command) == (NOTE, "llmrun prune")
    assert finding.words == f"2 files of background engines that have ended unexpectedly; {log}: MemoryError: 5 GB"
    assert "leftovers of background engines: 18 B" in run("prune", "--dry-run")[0]
    assert len([*engines.iterdir()]) == 2
    assert "leftovers of background engines: 18 B" in run("prune")[0]
    assert [*engines.iterdir()] == []


@pytest.mark.push
def test_an_engine_that_hangs_can_be_ended(engines: Path) -> None:
    process = started("one")
    process.send_signal(signal.SIGSTOP)
    (finding,) = found()
    assert (finding.status, finding.command) == (NOTE, "llmrun stop --all --force")
    assert finding.words == f"an unknown model (process {process.pid}): not answering"
    run(*finding.command.split()[1:])
    assert process.poll() == -signal.SIGKILL
    folder = open_folder(create=False)
    assert folder is not None
    with folder:
        assert folder.names() == []
