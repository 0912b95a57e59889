"""Tests of leases, with which a server lives as long as it has users."""

from __future__ import annotations

import asyncio
import errno
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.base.processes.locks import LockHeld, claim, claimed, is_held, locked
from llmrun.serving import leases
from llmrun.serving.leases import ServerFacts, ServerPlace
from tests.support.cli.commands import ROOT

FACTS = ServerFacts("http://127.0.0.1:1", "m", 8192, tools=True)


@pytest.fixture
def place(tmp_path: Path) -> ServerPlace:
    made = ServerPlace(tmp_path / "server")
    made.create()
    return made


def test_claims_count_until_they_end(tmp_path: Path) -> None:
    with claim(tmp_path), claim(tmp_path):
        assert claimed(tmp_path)
    assert not claimed(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_locks_exclude_and_end(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert not is_held(path)
    with locked(path):
        assert is_held(path)
        with pytest.raises(LockHeld), locked(path, 0):
            pass
    assert not is_held(path)


@pytest.mark.push
def test_a_killed_holder_leaves_nothing(place: ServerPlace) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path; from llmrun.serving.leases import ServerPlace\n"
        "with ServerPlace(Path(sys.argv[1])).lease() as folder:\n"
        "    (folder / 'secret').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, place.path], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert [*place.path.glob("runs/*/secret")]
    assert not place.has_leases()
    assert not [*place.path.glob("runs/*")]


def test_folders_of_holders_are_private(place: ServerPlace) -> None:
    with place.lease() as folder:
        assert place.has_leases()
        assert [stat.S_IMODE(each.stat().st_mode) for each in (place.path, folder)] == [0o700, 0o700]
    assert not folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mode bits")
def test_folders_of_others_are_refused(place: ServerPlace) -> None:
    place.path.chmod(0o755)
    with pytest.raises(UsageError, match="other users may access it") as caught:
        place.create()
    assert caught.value.hint == f"make it private: chmod 700 {place.path}"


async def ends(place: ServerPlace, within_s: float) -> bool:
    ended = asyncio.Event()
    task = asyncio.create_task(place.end_unused(ended.set))
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        task.cancel()
    return True


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LOOK_S", 0.01)


@pytest.mark.usefixtures("_often")
def test_a_server_ends_with_its_last_lease(place: ServerPlace) -> None:
    with ExitStack() as first, place.served():
        place.announce(FACTS)
        assert (place.facts(), place.is_alive()) == (FACTS, True)
        first.enter_context(place.lease())
        with place.lease():
            first.close()
            assert not asyncio.run(ends(place, 0.05))
        assert asyncio.run(ends(place, 5))
        assert place.facts() is None  # nobody can join any more
    assert not place.is_alive()


@pytest.mark.usefixtures("_often")
def test_a_server_waits_for_one_that_joins(place: ServerPlace) -> None:
    place.announce(FACTS)
    with place.joining(0):
        assert not asyncio.run(ends(place, 0.05))
    assert place.facts() == FACTS


@pytest.mark.usefixtures("_often")
def test_a_failed_look_is_repeated(place: ServerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment, a server may have too many open files."""
    failures = iter([OSError(errno.EMFILE, "too many open files")])

    def looked(*arguments: Any) -> bool:
        for failure in failures:
            raise failure
        return claimed(*arguments)

    monkeypatch.setattr(leases, "claimed", looked)
    assert asyncio.run(ends(place, 5))


@pytest.mark.usefixtures("_often")
def test_logs_stay_short(place: ServerPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_LONGEST_LOG", 100)
    monkeypatch.setattr(leases, "_KEPT_LOG", 10)
    with place.log.open("ab", buffering=0) as log:
        log.write(b"0123456789" * 20)
        assert asyncio.run(ends(place, 5))
        log.write(b"next")
    assert place.log.read_bytes() == b"0123456789next"
