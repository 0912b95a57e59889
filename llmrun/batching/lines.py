"""Reads the lines of a batch: JSON Lines, or the rows of a CSV file as JSON objects."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from llmrun.errors import UsageError
from llmrun.gguf.problems import shown

MIB: Final = 1 << 20
LONGEST_LINE: Final = 16 * MIB  # bytes, the same limit as for the body of a request to the server
_CHUNK: Final = MIB
_CSV: Final = {".csv": ",", ".tsv": "\t"}
_BLANK: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    number   counts from 1, as editors do; the first of several lines if a CSV row has line breaks
    data     the line, or a CSV row as a JSON object; b"" if there is a problem
    digest   the SHA-256 of the line, however long it is
    problem  why the line cannot be used, or ""
    """

    number: int
    data: bytes
    digest: bytes
    problem: str = ""


def is_csv(path: Path) -> bool:
    """Return whether a file's name says that it has comma-separated or tab-separated values."""
    return path.suffix.lower() in _CSV


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a batch that are not blank. Only one line is in memory at a time, however long it is.

    Raises UsageError for a file that cannot be read, and for a CSV file without a header or with a line that is too
    long.
    """
    try:
        with path.open("rb") as stream:
            yield from _csv_rows(stream, path) if is_csv(path) else _text_lines(stream)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _text_lines(stream: BinaryIO) -> Iterator[Line]:
    for number, line in enumerate(_bounded_lines(stream), 1):
        if line.problem or line.data:
            yield Line(number, line.data, line.digest, line.problem)


def _bounded_lines(stream: BinaryIO) -> Iterator[Line]:
    """Yield every line without the white space around it, and only a problem for one that is too long."""
    while piece := stream.readline(LONGEST_LINE + 1):
        if len(piece) <= LONGEST_LINE or piece.endswith(b"\n"):
            data = piece.removeprefix(_BOM).strip(_BLANK)
            yield Line(0, data, hashlib.sha256(data).digest())
            continue
        hashed, size = hashlib.sha256(), 0
        while piece:
            text = piece.removesuffix(b"\n")
            hashed.update(text)
            size += len(text)
            piece = b"" if piece.endswith(b"\n") else stream.readline(_CHUNK)
        yield Line(0, b"", hashed.digest(), f"the line has {size:,} bytes, limit {LONGEST_LINE:,}")


def _csv_rows(stream: BinaryIO, path: Path) -> Iterator[Line]:
    """Yield the rows of a CSV file as JSON objects, whose keys are the names in the header."""

    def texts() -> Iterator[str]:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
            if len(line) > LONGEST_LINE:
                raise UsageError(f"{path}: line {number:,}: more than {LONGEST_LINE:,} bytes")
            yield line.removeprefix(_BOM).decode(errors="surrogateescape")

    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader(texts(), delimiter=_CSV[path.suffix.lower()], strict=True)
    names = _header(next(rows, []), path)
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield _problem(number, f"not valid CSV: {error}")
            continue
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(names):
            yield _problem(number, f"the row has {len(row):,} fields, the header has {len(names):,}", row)
            continue
        try:
            data = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            yield _problem(number, "the row is not UTF-8 text", row)
            continue
        yield Line(number, data, hashlib.sha256(data).digest())


def _header(names: list[str], path: Path) -> list[str]:
    if not any(names):
        raise UsageError(f"{path}: the file has no header", hint="the first line of a CSV file names its columns")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f'{path}: two columns have the name "{shown(name, 40)}"')
    return [name.encode(errors="surrogateescape").decode(errors="replace") for name in names]


def _problem(number: int, problem: str, row: list[str] | None = None) -> Line:
    content = repr((problem, row)).encode(errors="surrogateescape")
    return Line(number, b"", hashlib.sha256(content).digest(), problem)
