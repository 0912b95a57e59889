"""Reads the input in windows, and finds equal calls and repeated IDs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from llmrun.jobs.batching.lines import Line, read_lines
from llmrun.jobs.batching.records import LineId
from llmrun.jobs.batching.requests import BadLine, Call, CallOptions, read_request

_LINES: Final = 10_000  # in a window; only a few hundred bytes of each line before it stay in memory
_BYTES: Final = 64 << 20
_MOST_MODELS: Final = 100


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line, and either its call or its problem."""

    id: LineId
    call: Call | None
    problem: BadLine | None = None


class Intake:
    """The lines of the input, which can be read once, in order.

    foreign_models  the names of models in the lines, which the run's own model answers
    """

    def __init__(self, path: Path, options: CallOptions, check: Callable[[], None] = lambda: None) -> None:
        """Open nothing yet. `check` is called for every line, and may raise an exception to stop."""
        self._lines = read_lines(path, check)
        self._options = options
        self._first_uses: dict[bytes, int] = {}  # by the digest of an ID, the number of the first line that has it
        self.foreign_models: set[str] = set()

    def next_window(self) -> list[ReadLine]:
        """Return the next lines, or an empty list after the last one. May run in any thread."""
        found, size = [], 0
        for line in islice(self._lines, _LINES):
            found.append(self._read(line))
            size += len(line.data)
            if size >= _BYTES:
                break
        return found

    def _read(self, line: Line) -> ReadLine:
        try:
            asked = read_request(line, self._options)
            self._check_id(line, asked.custom_id)
        except BadLine as problem:
            if problem.custom_id is not None:
                self._first_uses.setdefault(_digest(problem.custom_id), line.number)
            return ReadLine(LineId(line.number, line.digest, problem.custom_id), None, problem)
        if asked.call.model and len(self.foreign_models) < _MOST_MODELS:
            self.foreign_models.add(asked.call.model)
        return ReadLine(LineId(line.number, line.digest, asked.custom_id), asked.call)

    def _check_id(self, line: Line, custom_id: str) -> None:
        first = self._first_uses.setdefault(_digest(custom_id), line.number)
        if first != line.number:
            raise BadLine(f"custom_id: already used in line {first:,}", "duplicate_custom_id", custom_id)


def _digest(custom_id: str) -> bytes:
    return hashlib.sha256(custom_id.encode()).digest()[:16]


def survey(path: Path, each: Callable[[Line], None], check: Callable[[], None]) -> Iterator[int]:
    """Call `each` with every line, and yield their count so far after each window.

    check  called for every line, even if it is blank; may raise an exception to stop
    """
    count = 0
    for line in read_lines(path, check):
        each(line)
        count += 1
        if count % _LINES == 0:
            yield count
    yield count
