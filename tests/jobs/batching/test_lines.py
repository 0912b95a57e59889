"""Tests of reading the lines of a batch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.jobs.batching import requests
from llmrun.jobs.batching.requests import check_source, read_lines
from llmrun.jobs.batching.work import Stopped


def read(folder: Path, data: bytes, name: str = "in.jsonl") -> list[requests.Line]:
    path = folder / name
    path.write_bytes(data)
    return list(read_lines(path))


def rows(folder: Path, text: str) -> list[tuple[int, object]]:
    return [(line.number, json.loads(line.data)) for line in read(folder, text.encode(), "in.csv")]


def test_lines_have_their_numbers_and_no_white_space(tmp_path: Path) -> None:
    found = read(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\n  \t\n {"b": 2} \n{"c": 3}')
    assert [(line.number, line.data) for line in found] == [(1, b'{"a": 1}'), (4, b'{"b": 2}'), (5, b'{"c": 3}')]
    assert found[1].digest == hashlib.sha256(b'{"b": 2}').digest()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv"])
def test_utf_16_is_refused_with_a_hint(tmp_path: Path, name: str, encoding: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: not UTF-8, but UTF-16") as refused:
        read(tmp_path, "\ufeffprompt\nHello\n".encode(encoding), name)
    assert "Out-File -Encoding utf8" in refused.value.hint


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == read(tmp_path, b"\n\n \n") == []


def test_lines_that_are_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_LINE", 100)
    assert len(read(tmp_path, b"\n".join([b"x" * 100, b"y" * 100]))) == 2
    with pytest.raises(UsageError, match=r"in\.jsonl: line 2: the line has more than 100 bytes"):
        read(tmp_path, b"\n".join([b"x" * 100, b"x" * 101, b"short"]))


@given(st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").strip(b" \t\r\xef\xbb\xbf\xff\xfe"))))
def test_any_bytes_can_be_read(data: list[bytes]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        found = read(Path(folder), b"\n".join(data))
    assert [(line.number, line.data) for line in found] == [(n, each) for n, each in enumerate(data, 1) if each]


def test_csv_rows_become_objects(tmp_path: Path) -> None:
    text = 'text,language\n"Hello, world",French\n"two\nlines","a ""quoted"" word"\n\nlast,ö\n'
    assert rows(tmp_path, text) == [
        (2, {"text": "Hello, world", "language": "French"}),
        (3, {"text": "two\nlines", "language": 'a "quoted" word'}),
        (6, {"text": "last", "language": "ö"}),
    ]


def test_tsv_rows_have_tabs(tmp_path: Path) -> None:
    (line,) = read(tmp_path, b"a\tb\n1,5\t2\n", "in.TSV")
    assert json.loads(line.data) == {"a": "1,5", "b": "2"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"1", "the row has 1 fields, the header has 2"),
        (b"\xff,4", "the row is not UTF-8 text"),
        (b'"5"x,6', "not valid CSV: ',' expected after '\"'"),
    ],
)
def test_errors_in_rows_name_the_line(tmp_path: Path, row: bytes, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, b"a,b\n2,3\n" + row + b"\n7,8\n", "in.csv")
    assert str(caught.value) == f"{tmp_path}/in.csv: line 3: {words}"


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "no header"), (b"\n", "no header"), (b"a,b,a\n1,2,3\n", 'two columns have the name "a"')]
)
def test_a_csv_file_needs_names(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, data, "in.csv")


def test_a_csv_file_with_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LONGEST_LINE", 100)
    with pytest.raises(UsageError, match=r"line 2: the row has more than 100 bytes"):
        read(tmp_path, b"a\n" + b"x" * 200, "in.csv")
    with pytest.raises(UsageError, match=r"line 4: the row has more than 100 bytes"):
        read(tmp_path, b'a\n"' + b"x" * 60 + b"\nshort\n" + b"x" * 60, "in.csv")


@pytest.mark.parametrize("header", [b'"a"b,c\n1,2\n', b'"abc\n', b"\xff,\xfe\n1,2\n"])
def test_a_header_that_is_none_is_one_error(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(UsageError, match=r"the header is not (valid CSV|UTF-8)"):
        read(tmp_path, header, "in.csv")


def test_columns_are_checked_first(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text;label\nx;y\n")
    with pytest.raises(UsageError, match="no column is named prompt; the columns are text;label"):
        check_source(path, has_template=False)
    check_source(path, has_template=True)
    path.write_text("custom_id,prompt\n")
    check_source(path, has_template=False)


def test_reading_can_be_stopped_in_blank_lines(tmp_path: Path) -> None:
    path, seen = tmp_path / "in.jsonl", list[int]()
    path.write_bytes(b"\n" * 100)

    def check() -> None:
        seen.append(1)
        if len(seen) == 50:
            raise Stopped

    with pytest.raises(Stopped):
        list(read_lines(path, check))


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_lines(tmp_path))
