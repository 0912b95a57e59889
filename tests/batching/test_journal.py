"""Tests of the journal: what a crash, a full disk or a second run can do to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llmrun.batching.journal import Journal
from llmrun.errors import DoesNotFit, UsageError
from tests.support.hub.small_disks import SmallDisk, mount, unmount

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


def test_every_cut_keeps_the_records_before_it(output: Path) -> None:
    data = written(output, [1, 2, 3])
    ends = [offset for offset in range(len(data) + 1) if data[:offset].endswith(b"\n")]
    for size in range(len(data)):
        partial(output).write_bytes(data[:size])
        with closing(Journal.open(output)) as journal:
            whole = sum(end <= size for end in ends) - 1
            assert list(journal.places) == [1, 2, 3][: max(0, whole)]
            if whole < 0:
                journal.begin(HEADER)
            journal.add(9, record(9))
        with closing(Journal.open(output)) as journal:
            assert journal.record(9) == record(9)


def test_every_flipped_bit_loses_at_most_its_record(output: Path) -> None:
    data = written(output, [1, 2, 3])
    header = data.index(b"\n") + 1
    for offset in range(header, len(data)):
        partial(output).write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        with closing(Journal.open(output)) as journal:
            for number in journal.places:
                assert journal.record(number) in (record(1), record(2), record(3))
            assert len(journal.places) >= 1


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
        journal.write_output(output)
    assert output.read_bytes() == b"".join(record(n) + b"\n" for n in (1, 3, 20))
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_a_journal_in_which_no_run_began_is_removed(output: Path) -> None:
    Journal.open(output).close()
    assert list(output.parent.iterdir()) == []


def test_two_runs_cannot_write_the_same_file(output: Path) -> None:
    with closing(Journal.open(output)), pytest.raises(UsageError, match="another run is writing to this file"):
        Journal.open(output)


@pytest.mark.parametrize("data", [b"an important file", b'{"format": "another one"}\n', b"[]\n", b"\x00\xff\n"])
def test_a_file_that_is_no_journal_is_left_alone(output: Path, data: bytes) -> None:
    partial(output).write_bytes(data)
    with pytest.raises(UsageError, match="not a journal"):
        Journal.open(output)
    assert partial(output).read_bytes() == data


@pytest.fixture
def full(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a real disk with room for 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount(folder, 1 << 20):
        pytest.skip("mounting needs a privilege")
    try:
        (folder / "ballast").write_bytes(bytes((1 << 20) - (64 << 10)))
        yield SmallDisk(folder, True, 0)
    finally:
        unmount(folder)


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
        journal.write_output(output)
    assert output.read_bytes() == b"".join(b"x" * 1500 + b"\n" for _ in done) + b"y\n"


def test_a_disk_that_is_full_at_the_end_keeps_the_journal(full: SmallDisk) -> None:
    output = full.folder / "out.jsonl"
    with closing(Journal.open(output)) as journal:
        journal.begin(HEADER)
        for number in range(1, 30):
            journal.add(number, b"x" * 1500)
        with pytest.raises(DoesNotFit):
            journal.write_output(output)
    assert sorted(path.name for path in full.folder.iterdir()) == ["ballast", "out.jsonl.partial"]
