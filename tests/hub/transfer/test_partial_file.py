"""Tests of a partial file and its journal: only received bytes count, whatever happened to the writing process."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.hub.local import safe_writes
from llmrun.hub.local.safe_writes import alone_with
from llmrun.hub.transfer import partial_file
from llmrun.hub.transfer.partial_file import ByteRun, PartialFile, journal_of, remove
from tests.support.hub.small_disks import SmallDisk

DATA = bytes(range(256)) * 8
SIZE = len(DATA)
SHA = "a" * 64


@contextlib.contextmanager
def opened(path: Path, size: int = SIZE, sha256: str | None = SHA) -> Iterator[PartialFile]:
    made = PartialFile(path, size, sha256)
    try:
        yield made
    finally:
        made.close()


def put(to: PartialFile, start: int, end: int) -> None:
    run = to.begin(start)
    to.write(run, DATA[start:end])
    to.end(run)


def put_in_pieces(to: PartialFile, run: ByteRun, data: bytes) -> None:
    for start in range(0, len(data), 1 << 16):
        to.write(run, data[start : start + (1 << 16)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.incomplete"


def test_what_is_missing_is_known_at_any_time(path: Path) -> None:
    with opened(path) as made:
        assert (made.received, made.frontier, made.gaps()) == (0, 0, [(0, SIZE)])
        put(made, 100, 200)
        put(made, 0, 50)
        assert (made.received, made.frontier) == (150, 50)
        assert made.gaps() == [(50, 100), (200, SIZE)]
        put(made, 50, 100)
        put(made, 200, SIZE)
        assert (made.received, made.frontier, made.gaps()) == (SIZE, SIZE, [])
        assert made.read(0, SIZE) == DATA


spans = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


@pytest.mark.push
@given(spans=spans, stops=st.sets(st.integers(0, 11)))
def test_any_order_of_runs_over_any_number_of_processes_gives_the_file(
    spans: list[tuple[int, int]], stops: set[int]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p"
        here: set[int] = set()
        made = PartialFile(path, SIZE, SHA)
        for number, (first, last) in enumerate(spans):
            for start, end in made.gaps():
                inside = range(max(start, first), min(end, last))
                if inside:
                    put(made, inside.start, inside.stop)
                    here |= set(inside)
            if number in stops:  # killed here: nothing is closed, and another process opens the files
                made = PartialFile(path, SIZE, SHA)
            assert made.received == len(here)
            assert {byte for start, end in made.gaps() for byte in range(start, end)} == set(range(SIZE)) - here
        for start, end in made.gaps():
            put(made, start, end)
        assert path.read_bytes() == DATA
        made.close()


@pytest.mark.push
@given(journal=st.binary(max_size=400), head=st.sampled_from([b"", None]))
@example(journal=b"[1]\n", head=b"")
@example(journal=b"{}\n", head=b"")
def test_no_journal_whatever_it_says_makes_bytes_that_are_not_there(journal: bytes, head: bytes | None) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p"
        with opened(path) as made:
            put(made, 0, 1000)
        whole = journal_of(path).read_bytes()
        journal_of(path).write_bytes(journal if head is not None else whole.partition(b"\n")[0] + b"\n" + journal)
        with opened(path) as again:
            assert again.received <= 1000
            assert again.received == SIZE - sum(end - start for start, end in again.gaps())


lines = st.lists(st.tuples(*[st.integers(0, 2 * SIZE)] * 3), max_size=8)


@pytest.mark.push
@given(lines=lines)
def test_lines_that_contradict_each_other_are_cut_to_what_can_be(lines: list[tuple[int, int, int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p"
        with opened(path) as made:
            put(made, 0, 1500)
        head = journal_of(path).read_bytes().partition(b"\n")[0] + b"\n"
        journal_of(path).write_bytes(head + b"".join(b"%020d %020d %020d\n" % line for line in lines))
        with opened(path) as again:
            assert again.received == SIZE - sum(end - start for start, end in again.gaps())
            assert again.received <= 1500


def test_after_a_power_cut_only_what_had_reached_the_disk_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as made:
        put(made, 0, 100)
        made.sync()
        put(made, 100, 300)
        put(made, 500, 600)
    with opened(path) as same_boot:
        assert same_boot.received == 400
    monkeypatch.setattr(partial_file, "boot_id", lambda: "another")
    with opened(path) as after:
        assert after.gaps() == [(100, SIZE)]
        put(after, 100, 200)
    with opened(path) as again:
        assert again.gaps() == [(200, SIZE)]


def test_without_a_boot_and_a_sha256_only_what_had_reached_the_disk_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_file, "boot_id", lambda: "")
    for sha256, received in ((SHA, 300), (None, 100)):
        remove(path)
        with opened(path, sha256=sha256) as made:
            made.name_version('"v1"')
            put(made, 0, 100)
            made.sync()
            put(made, 100, 300)
        with opened(path, sha256=sha256) as again:
            assert again.received == received


# --- concurrent removal -----------------------------------------------------------------------------------------------


def is_free(path: Path) -> bool:
    with alone_with([path]) as busy:
        return busy is None


def test_it_is_in_use_as_long_as_it_is_open(path: Path) -> None:
    with opened(path) as made:
        assert not is_free(path)
        put(made, 0, 100)
        made.clear()
        assert not is_free(path)
    assert is_free(path)


def test_the_journal_is_there_before_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    new_journal = PartialFile._new_journal

    def watched(self: PartialFile) -> FileIO:
        made = new_journal(self)
        seen.append((journal_of(path).exists(), path.exists()))
        return made

    monkeypatch.setattr(PartialFile, "_new_journal", watched)
    with opened(path):
        assert seen == [(True, False)]


def test_one_that_is_being_removed_is_one_sentence(path: Path) -> None:
    with opened(path):
        pass
    with alone_with([path]), pytest.raises(LlmrunError, match="another process is removing this file"):
        PartialFile(path, SIZE, SHA)
    with opened(path) as made:
        assert made.received == 0


@pytest.mark.parametrize("begins_anew", [False, True])
def test_one_that_is_removed_while_it_is_opened_is_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    with opened(path) as made:
        put(made, 0, 100)
    times = [1]

    def removed(when: str) -> None:
        if when == ("held" if begins_anew else "read") and times:
            times.clear()
            remove(path)

    new_journal, lock = PartialFile._new_journal, safe_writes.try_lock

    def after_reading(self: PartialFile) -> FileIO:
        file = new_journal(self)
        removed("read")
        return file

    def after_holding(held: contextlib.ExitStack, at: Path, *, shared: bool) -> bool:
        locked = lock(held, at, shared=shared)
        removed("held")
        return locked

    monkeypatch.setattr(PartialFile, "_new_journal", after_reading)
    monkeypatch.setattr(partial_file, "try_lock", after_holding)
    with opened(path) as again:
        assert times == []
        assert (again.received, path.stat().st_size) == (0, 0)
        put(again, 0, SIZE)
    assert path.read_bytes() == DATA


def test_where_there_are_no_locks_it_goes_without(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", refuse)
        with opened(path) as made:
            put(made, 0, SIZE)
    with contextlib.ExitStack() as held, monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "win32")
        assert safe_writes.try_lock(held, path, shared=True)
    assert is_free(path)


@pytest.mark.parametrize(("size", "sha256"), [(SIZE + 1, SHA), (SIZE, "b" * 64), (SIZE, None)])
def test_what_was_begun_of_another_file_does_not_count(path: Path, size: int, sha256: str | None) -> None:
    with opened(path) as made:
        made.name_version('"v1"')
        put(made, 0, 100)
    with opened(path, size, sha256) as other:
        assert (other.received, other.validator) == (0, "")


def test_the_version_is_remembered_and_one_without_a_name_and_a_sha256_is_begun_anew(path: Path) -> None:
    for validator, received in (('"v1"', 100), ("", 0)):
        remove(path)
        with opened(path, sha256=None) as made:
            put(made, 0, 100)
            made.name_version(validator)
            made.name_version(validator)
        with opened(path, sha256=None) as again:
            assert (again.validator, again.received) == (validator, received)


def test_a_file_that_was_cut_off_counts_as_far_as_it_goes(path: Path) -> None:
    with opened(path) as made:
        put(made, 0, 100)
        put(made, 200, 300)
    os.truncate(path, 50)
    with opened(path) as again:
        assert again.gaps() == [(50, SIZE)]


def test_beginning_anew_forgets_everything(path: Path) -> None:
    with opened(path) as made:
        made.name_version('"v1"')
        put(made, 0, 100)
        made.clear()
        assert (made.received, made.validator, path.stat().st_size) == (0, "", 0)
        put(made, 0, SIZE)
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("which", ["file", "journal"])
def test_a_link_in_its_place_is_removed_not_followed(path: Path, tmp_path: Path, which: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (path if which == "file" else journal_of(path)).symlink_to(victim)
    with opened(path) as made:
        put(made, 0, 100)
    assert victim.read_bytes() == b"mine"
    assert not path.is_symlink()


def test_threads_write_side_by_side(path: Path) -> None:
    with opened(path) as made:
        steps = range(0, SIZE, 128)
        threads = [threading.Thread(target=put, args=(made, start, start + 128)) for start in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.gaps() == []
    assert path.read_bytes() == DATA


def test_two_never_write_the_same_run(path: Path) -> None:
    with opened(path) as made:
        first = made.begin(0)
        second = made.begin(0)
        assert first is not second
        made.end(first)
        made.end(first)
        assert made.begin(0) is first


def test_a_full_disk_keeps_what_was_written(full_disk: SmallDisk) -> None:
    path, data = full_disk.folder / "p", bytes(3 << 20)
    with opened(path, len(data)) as made:
        run = made.begin(0)
        with pytest.raises(DoesNotFit, match="full"):
            put_in_pieces(made, run, data)
    received = made.received
    assert 500_000 < received < 2 << 20
    full_disk.make_room()
    with opened(path, len(data)) as again:
        assert again.received == received
        put(again, received, received + 100)


def test_all_of_it_is_found_and_removed(path: Path) -> None:
    with opened(path):
        pass
    path.unlink()
    remove(path)
    assert [*path.parent.iterdir()] == []
    remove(path)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LlmrunError, match="cannot be written: No such file"):
        PartialFile(tmp_path / "none" / "p", SIZE, SHA)
