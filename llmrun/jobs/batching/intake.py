"""Reads the input in windows, finds equal calls and repeated IDs, and writes the lines of the output.

The output has the format of OpenAI's Batch API. A record depends only on the run, its line and the answer, never on the
time or on concurrent requests. Therefore, an interrupted run produces the same output as an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.batching.requests import (
    Asked,
    Call,
    CallOptions,
    Line,
    bad_line,
    digest_of,
    read_lines,
    read_request,
)
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION, Reply

_OK: Final = 200
_PREFIXES: Final = {CHAT: "chatcmpl", COMPLETION: "cmpl"}


@dataclass(frozen=True, slots=True)
class LineId:
    """The identity of a line: its number, the digest of its bytes, and its own ID."""

    number: int
    digest: bytes
    custom_id: str


@dataclass(frozen=True, slots=True)
class RecordWriter:
    """Writes the records of one run.

    run    identifies everything except the line that can change an answer
    model  the name of the model in all answers, or None to keep the name that each worker reports
    """

    run: str
    model: str | None

    def record_id(self, number: int, digest: bytes) -> str:
        """Return the ID that proves that a record belongs to the given line of this run."""
        return f"batch_req_{self._hex(number, digest.hex())}"

    def answered(self, line: LineId, call: Call, reply: Reply, fingerprint: str | None) -> bytes:
        """Return the record of a line with an answer.

        fingerprint  identifies the worker in runs whose workers may give different answers; otherwise None
        """
        digits = self._hex(call.url, call.key.hex())
        body = reply.body
        if reply.status == _OK:
            body = _lasting(body) | {"id": f"{_PREFIXES[call.url]}-{digits}", "created": 0}
            if self.model is not None:
                body["model"] = self.model
        response = {"status_code": reply.status, "request_id": f"req_{digits}", "body": body}
        return self._record(line, response, None, {} if fingerprint is None else {"fingerprint": fingerprint})

    def failed(self, line: LineId, code: str, message: str) -> bytes:
        """Return the record of a line that received no answer."""
        return self._record(line, None, {"code": code, "message": message}, {})

    def copied(self, line: LineId, record: bytes) -> bytes:
        """Return the record of a line with the same call as another line, derived from the other line's record."""
        other = json.loads(record)
        return _encoded(other | {"id": self.record_id(line.number, line.digest), "custom_id": line.custom_id})

    def _record(
        self, line: LineId, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> bytes:
        head = {"id": self.record_id(line.number, line.digest), "custom_id": line.custom_id}
        return _encoded({**head, "response": response, "error": error, **more})

    def _hex(self, *parts: object) -> str:
        return hashlib.sha256(json.dumps([self.run, *parts]).encode()).hexdigest()[:24]


def is_success(record: bytes) -> bool:
    """Return whether a record contains an answer. Raises ValueError if the data is not a record."""
    try:
        parsed = json.loads(record)
    except RecursionError:
        parsed = None
    if not isinstance(parsed, dict) or "response" not in parsed:
        raise ValueError("not a batch output record")
    response = parsed["response"]
    return isinstance(response, dict) and response.get("status_code") == _OK


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def _lasting(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that depend on neither the time nor the state of the cache."""
    kept = {name: value for name, value in body.items() if name != "timings"}
    usage = kept.get("usage")
    if isinstance(usage, dict):
        kept["usage"] = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
    return kept


_LINES: Final = 10_000  # lines per window; each earlier line takes only a few hundred bytes of memory
_BYTES: Final = 64 << 20
_MOST_MODELS: Final = 100


@dataclass(frozen=True, slots=True)
class ReadLine:
    """A line of the input, with its call."""

    id: LineId
    call: Call


class Intake:
    """The lines of the input, which can be read only once and in order.

    foreign_models  the names of other models in the lines, which the run's own model answers
    """

    def __init__(self, path: Path, options: CallOptions, check: Callable[[], None] = lambda: None) -> None:
        """Create an intake without opening the file. `check` is called for every line and may raise an exception."""
        self._path = path
        self._lines = read_lines(path, check)
        self._options = options
        self._first_uses: dict[bytes, int] = {}  # maps the digest of an ID to the number of the first line with that ID
        self.foreign_models: set[str] = set()

    def next_window(self) -> list[ReadLine]:
        """Return the next lines, or an empty list after the last line. This method may run in any thread.

        Raises UsageError for a line that is not a request, or that repeats the ID of an earlier line.
        """
        found, size = [], 0
        for line in islice(self._lines, _LINES):
            found.append(self._read(line))
            size += len(line.data)
            if size >= _BYTES:
                break
        return found

    def _read(self, line: Line) -> ReadLine:
        asked = _request(line, self._path, self._options)
        first = self._first_uses.setdefault(_digest(asked.custom_id), line.number)
        if first != line.number:
            raise bad_line(self._path, line.number, f"custom_id: already used in line {first:,}")
        if asked.call.model and len(self.foreign_models) < _MOST_MODELS:
            self.foreign_models.add(asked.call.model)
        return ReadLine(LineId(line.number, digest_of(line, asked.call), asked.custom_id), asked.call)


def _request(line: Line, path: Path, options: CallOptions) -> Asked:
    try:
        return read_request(line, options)
    except LlmrunError as error:
        raise bad_line(path, line.number, str(error), error.hint) from None


def _digest(custom_id: str) -> bytes:
    return hashlib.sha256(custom_id.encode()).digest()[:16]


def check_input(path: Path, options: CallOptions, progress: Callable[[int], None]) -> bool:
    """Read all lines of the input, and return whether any line has an image.

    progress  called with the number of lines so far
    Raises UsageError for the first bad line, and for an input without lines.
    """
    intake, count, has_images = Intake(path, options), 0, False
    while window := intake.next_window():
        count += len(window)
        has_images = has_images or any(line.call.has_images for line in window)
        progress(count)
    if not count:
        raise UsageError(f"{path}: the file has no lines")
    return has_images


def survey(path: Path, options: CallOptions, each: Callable[[Line], None], check: Callable[[], None]) -> Iterator[int]:
    """Call `each` for every line, and yield the number of lines read so far after each window.

    check  called for every line, including blank lines; may raise an exception to stop
    """
    count = 0
    for line in read_lines(path, check):
        if options.folder is not None:  # the digest of the line depends on the files of its images
            line = replace(line, digest=digest_of(line, _request(line, path, options).call))
        each(line)
        count += 1
        if count % _LINES == 0:
            yield count
    yield count
