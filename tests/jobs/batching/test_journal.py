"""Tests of the journal: what a crash, a full disk or a second run can do to it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llmrun.base.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.jobs.batching.journal import Journal
from llmrun.jobs.batching.work import Halt, Stopped
from tests.support.hub.small_disks import SmallDisk, mounted_disk

HEADER = {"model": "a-model", "seed": 1}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def partial(output: Path) -> Path:
    return output.with_name("out.jsonl.partial")


def written(output: Path, numbers: list[int]) -> bytes:
    """Write a journal with a record for each number, and return its bytes."""
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        for number in numbers:
            journal.add(number, record(number))
    return partial(output).read_bytes()


def record(number: int) -> bytes:
    return json.dumps({"id": f"record {number}", "text": "ö" * number}, ensure_ascii=False).encode()


def test_a_journal_is_read_again(output: Path) -> None:
    written(output, [3, 1, 20])
    with closing(Journal.open(output)) as journal:
        assert journal.header == HEADER
        assert {number: journal.record(number) for number in journal.places} == {n: record(n) for n in (3, 1, 20)}
        journal.add(2, record(2))
    with closing(Journal.open(output)) as journal:
        assert list(journal.places) == [3, 1, 20, 2]


@pytest.mark.push
def test_every_cut_keeps_the_records_before_it(output: Path) -> None:
    data = written(output, [1, 2, 3])
    ends = [offset for offset in range(len(data) + 1) if data[:offset].endswith(b"\n")]
    for size in range(ends[0], len(data)):  # the header is complete, because the file gets its name after that
        partial(output).write_bytes(data[:size])
        with closing(Journal.open(output)) as journal:
            assert list(journal.places) == [1, 2, 3][: sum(end <= size for end in ends) - 1]
            journal.add(9, record(9))
        with closing(Journal.open(output)) as journal:
            assert journal.record(9) == record(9)


@pytest.mark.push
def test_every_flipped_bit_loses_only_its_record(output: Path) -> None:
    data = written(output, [1, 2, 3])
    for offset in range(data.index(b"\n") + 1, len(data)):
        partial(output).write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        with closing(Journal.open(output)) as journal:
            found = {number: journal.record(number) for number in journal.places}
        whole = {n: record(n) for n in (1, 2, 3)}
        assert found.items() <= whole.items()
        assert len(found) >= 1


def test_a_record_that_was_written_again_replaces_the_first(output: Path) -> None:
    written(output, [1, 2])
    with closing(Journal.open(output)) as journal:
        journal.drop(1)
        assert list(journal.places) == [2]
        journal.add(1, b'{"id": "new"}')
    with closing(Journal.open(output)) as journal:
        assert journal.record(1) == b'{"id": "new"}'


def test_the_output_is_in_the_order_of_the_lines(output: Path) -> None:
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        for number in (3, 1, 20):
            journal.add(number, record(number))
        journal.write_output()
    assert output.read_bytes() == b"".join(record(n) + b"\n" for n in (1, 3, 20))
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_nothing_is_written_before_a_run_begins(output: Path) -> None:
    Journal.open(output).close()
    assert list(output.parent.iterdir()) == []


def test_a_run_begins_at_once_or_not_at_all(output: Path) -> None:
    before = written(output, [1, 2])

    def broken() -> Iterator[tuple[int, bytes]]:
        yield 1, b"{}"
        raise ZeroDivisionError

    with closing(Journal.open(output)) as journal, pytest.raises(ZeroDivisionError):
        journal.begin({"model": "another"}, broken())
    assert partial(output).read_bytes() == before
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl.partial"]


def test_a_run_can_begin_with_records(output: Path) -> None:
    written(output, [1, 2])
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER, [(7, record(7))])
        journal.add(8, record(8))
    with closing(Journal.open(output)) as journal:
        assert {number: journal.record(number) for number in journal.places} == {7: record(7), 8: record(8)}


def test_what_a_killed_process_left_is_removed(output: Path) -> None:
    left = [output.parent / f".out.jsonl{more}.llmrun-{'0' * 16}" for more in ("", ".partial")]
    kept = [
        output.parent / name for name in (".out.jsonl.complete", ".out.jsonl.llmrun-notes", ".other.llmrun-" + "0" * 16)
    ]
    for path in (*left, *kept):
        path.write_text("precious")
    Journal.open(output).close()
    assert {*output.parent.iterdir()} == {*kept}


def test_an_output_that_appears_meanwhile_is_not_replaced(output: Path) -> None:
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        journal.add(1, record(1))
        output.write_text("precious")
        with pytest.raises(LlmrunError, match="another program has changed this file in the meantime"):
            journal.write_output()
    assert output.read_text() == "precious"
    output.unlink()
    with closing(Journal.open(output)) as journal:
        journal.write_output()
    assert output.read_bytes() == record(1) + b"\n"


def test_a_journal_that_was_removed_meanwhile_is_not_needed(output: Path) -> None:
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        journal.add(1, record(1))
        partial(output).unlink()
        journal.write_output()
    assert output.read_bytes() == record(1) + b"\n"


def test_reading_a_journal_can_be_stopped(output: Path) -> None:
    written(output, [1, 2, 3])
    halt = Halt()
    halt.set()
    with pytest.raises(Stopped):
        Journal.open(output, halt.check)
    Journal.open(output).close()  # the lock is free


def test_two_runs_cannot_write_the_same_file(output: Path) -> None:
    with closing(Journal.open(output)), pytest.raises(UsageError, match="another run is writing to this file"):
        Journal.open(output)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"an important file",
        b'{"format": "another one"}\n',
        b"[]\n",
        b"\x00\xff\n",
        b"[" * 200_000,
        b"5" * 9_000 + b"\n",
    ],
)
def test_a_file_that_is_no_journal_is_left_alone(output: Path, data: bytes) -> None:
    partial(output).write_bytes(data)
    with pytest.raises(UsageError, match="not a journal"):
        Journal.open(output)
    assert partial(output).read_bytes() == data


def test_a_pipe_is_no_journal(output: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    os.mkfifo(partial(output))
    with pytest.raises(UsageError, match="not a file"):
        Journal.open(output)


def test_a_link_is_no_journal(output: Path) -> None:
    victim = output.with_name("victim")
    victim.write_text("precious")
    partial(output).symlink_to(victim)
    with pytest.raises(LlmrunError, match="cannot be written"):
        Journal.open(output)
    assert victim.read_text() == "precious"


def test_a_number_of_a_line_has_a_limit(output: Path) -> None:
    data = written(output, [1])
    partial(output).write_bytes(data + b"9" * 5000 + b" 00000000 {}\n")
    with closing(Journal.open(output)) as journal:
        assert list(journal.places) == [1]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted_disk(tmp_path / "disk", 1 << 20, room=64 << 10) as disk:
        yield disk


def fill(journal: Journal) -> None:
    for number in range(1, 100):
        journal.add(number, b"x" * 1500)


def test_a_full_disk_leaves_the_journal_intact(full: SmallDisk) -> None:
    output = full.folder / "out.jsonl"
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        with pytest.raises(DoesNotFit, match="full, 0 bytes free") as caught:
            fill(journal)
        done = list(journal.places)
    assert caught.value.hint == "free up space, then run the same command again to continue"
    full.make_room()
    with closing(Journal.open(output)) as journal:
        assert list(journal.places) == done
        journal.add(100, b"y")
        journal.write_output()
    assert output.read_bytes() == b"".join(b"x" * 1500 + b"\n" for _ in done) + b"y\n"


def test_a_disk_that_is_full_at_the_end_keeps_the_journal(full: SmallDisk) -> None:
    output = full.folder / "out.jsonl"
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        for number in range(1, 30):
            journal.add(number, b"x" * 1500)
        with pytest.raises(DoesNotFit):
            journal.write_output()
    assert sorted(path.name for path in full.folder.iterdir()) == ["ballast", "out.jsonl.partial"]
