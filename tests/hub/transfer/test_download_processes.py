"""Tests of downloads by processes that are killed, interrupted or run at the same time."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun.hub.names import Artifact
from llmrun.hub.transfer.partial_file import JOURNAL, understood
from tests.support.hub.fake_hub import HALF, MODEL, SHA256, FakeHub, Fault, fake_hub
from tests.support.hub.fetching import TOKEN, Folders, artifact_of, outcome

pytestmark = pytest.mark.push

PATIENCE_S = 60  # for a process that hangs; normal runs take far less


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add("org/repo", {"model.gguf": MODEL})
        yield running


@pytest.fixture
def model(hub: FakeHub) -> Artifact:
    return artifact_of(hub.repositories["org/repo"], "model.gguf")


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def half_done(folders: Folders, hub: FakeHub, model: Artifact, prelude: str = "") -> subprocess.Popen[str]:
    """Start a process that has written and recorded the first half and waits for the rest."""
    hub.faults.append(Fault(stall_after=HALF))
    process = folders.start(model, hub, prelude)
    wait_until(lambda: any(recorded(path) == HALF for path in folders.files() if path.name.endswith(JOURNAL)))
    return process


def recorded(journal: Path) -> int:
    """Return the number of received bytes in a journal, or 0 if it was replaced meanwhile."""
    try:
        return sum(written - start for start, written, _ in understood(journal.read_bytes())[1])
    except (FileNotFoundError, ValueError):
        return 0


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate(timeout=PATIENCE_S)


def test_what_a_killed_process_received_is_not_fetched_again(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    process = half_done(folders, hub, model)
    process.kill()
    finish(process)
    assert folders.wrong(model, whole=False) == []
    got = outcome(finish(folders.start(model, hub))[0])
    assert got.path is not None
    assert got.path.read_bytes() == MODEL
    wait_until(lambda: hub.downloads() == 2)
    assert [asked.range for asked in hub.asked if asked.at == "storage"][-1] == f"bytes={HALF}-{len(MODEL) - 1}"
    assert folders.wrong(model, whole=True) == []


def test_ctrl_c_ends_at_once_and_keeps_what_was_received(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    process = half_done(folders, hub, model, "import os; os.environ['HF_HUB_DOWNLOAD_TIMEOUT'] = '600'")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, complaints = finish(process)
    # the server is silent that long, and could be silent for ten minutes
    assert time.monotonic() - started < PATIENCE_S / 2
    assert process.returncode == -signal.SIGINT
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert TOKEN not in complaints
    got = outcome(finish(folders.start(model, hub))[0])
    assert got.steps[0][1] >= HALF
    assert hub.sent() == len(MODEL)
    assert folders.wrong(model, whole=True) == []


def test_two_processes_fetch_once_and_both_get_the_model(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    first = half_done(folders, hub, model)
    second = folders.start(model, hub)
    assert second.stdout is not None
    assert outcome(second.stdout.readline()).notes == ["tiny: waiting for another process's download"]
    hub.release.set()
    results = [outcome(finish(process)[0]) for process in (first, second)]
    assert results[0].path == results[1].path is not None
    assert (hub.downloads(), hub.sent()) == (1, len(MODEL))
    assert "checking" not in str(results[1].labels())
    assert folders.wrong(model, whole=True) == []


@pytest.mark.night
def test_when_the_first_of_two_is_killed_the_second_goes_on(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    first = half_done(folders, hub, model)
    second = folders.start(model, hub)
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    first.kill()
    finish(first)
    got = outcome(finish(second)[0])
    assert got.path is not None
    wait_until(lambda: hub.downloads() == 2)
    assert hub.sent() == len(MODEL)
    assert folders.wrong(model, whole=True) == []


def test_another_tool_that_downloads_is_waited_for(folders: Folders, hub: FakeHub, model: Artifact) -> None:
    import filelock

    lock = folders.cache / ".locks" / "models--org--repo" / f"{SHA256}.lock"
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock):
        process = folders.start(model, hub)
        assert process.stdout is not None
        assert outcome(process.stdout.readline()).notes == ["tiny: waiting for another process's download"]
        assert hub.asked == []
    assert outcome(finish(process)[0]).path


def test_the_real_address_and_token_are_asked_for(folders: Folders, hub: FakeHub) -> None:
    model = artifact_of(hub.add("org/private", {"model.gguf": MODEL}, token=TOKEN), "model.gguf")
    process = folders.start(model, hub)
    out, complaints = finish(process)
    assert outcome(out).path
    assert TOKEN not in out + complaints
    assert {asked.authorization for asked in hub.asked if asked.at == "storage"} == {""}
