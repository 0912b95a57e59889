"""Reads the input in windows, and finds equal calls and repeated IDs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from llmrun.batching.lines import Line, read_lines
from llmrun.batching.records import LineId
from llmrun.batching.requests import Asked, BadLine, Call, CallOptions, read_request

_LINES: Final = 10_000  # in a window, so that memory does not grow with the input
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

    def __init__(self, path: Path, options: CallOptions) -> None:
        self._lines = read_lines(path)
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
            asked = self._with_own_id(line, read_request(line, self._options))
        except BadLine as problem:
            return ReadLine(LineId(line.number, line.digest, problem.custom_id), None, problem)
        if asked.call.model and len(self.foreign_models) < _MOST_MODELS:
            self.foreign_models.add(asked.call.model)
        return ReadLine(LineId(line.number, line.digest, asked.custom_id), asked.call)

    def _with_own_id(self, line: Line, asked: Asked) -> Asked:
        digest = hashlib.sha256(asked.custom_id.encode()).digest()[:16]
        first = self._first_uses.setdefault(digest, line.number)
        if first != line.number:
            raise BadLine(f"custom_id: line {first:,} has the same one", "duplicate_custom_id", asked.custom_id)
        return asked


def survey(path: Path, each: Callable[[Line], None]) -> Iterator[int]:
    """Call `each` with every line, and yield their count so far every now and then."""
    count = 0
    for line in read_lines(path):
        each(line)
        count += 1
        if count % _LINES == 0:
            yield count
    yield count
