"""How much of each prompt was reused, and why not more: the words for logs and headers, and records for `llmrun why`.

    why/prefixes.jsonl, why/prefixes.1.jsonl   in the cache folder, 0600 in a folder with 0700

A full first file replaces the second one. The records contain short pieces of prompts, where a prompt
differs from an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
from msgspec import Struct, structs

from llmrun.base.errors import shown
from llmrun.base.folders import O_BINARY, O_NOFOLLOW, O_NONBLOCK, cache_folder
from llmrun.engine.requests import PrefixCause, PrefixReport

MOST_BYTES: Final = 1 << 19  # of one file
UNUSED_S: Final = 30 * 86_400
_LONGEST_AGENT: Final = 60  # characters
_LEAST_KNOWN: Final = 128  # tokens; shorter beginnings are often the template's own text
_MOST_KNOWN: Final = 4096  # beginnings
_LONGEST_LINE: Final = 4096  # bytes
_MOST: Final = 1e12  # larger numbers are errors
_NAME: Final = "prefixes.jsonl"


class Record(Struct, frozen=True, omit_defaults=True):
    """One request: its Unix time, model, User-Agent, the seconds that its prompt took, and its PrefixReport."""

    time: float
    model: str
    agent: str
    seconds: float
    report: PrefixReport


class Records(Struct, frozen=True):
    """The records, the oldest first, and the number of unreadable lines."""

    found: Sequence[Record]
    damaged: int


def prefix_log_folder() -> Path:
    return cache_folder("why")


def reused_words(report: PrefixReport, *, for_client: bool = False) -> str:
    """Describe a report without any text of a prompt, as in "reused 312 of 18,889: text differs, system prompt".

    for_client  hide whether another key has the same prefix, which would reveal that key's prompts
    """
    cause = PrefixCause.FIRST if for_client and report.cause is PrefixCause.OTHER_KEY else report.cause
    ago_s = report.ago_s if cause in (PrefixCause.EVICTED, PrefixCause.RESTARTED) else 0.0
    details = [cause.value, report.where, report.detail, ago_words(ago_s)]
    words = ", ".join(filter(None, details))
    return f"reused {report.reused:,} of {report.total:,}" + (f": {words}" if words else "")


def ago_words(seconds: float) -> str:
    """Return "12 minutes ago" or similar, or "" for 0."""
    for name, length in (("hour", 3600), ("minute", 60), ("second", 1)):
        if (n := round(seconds / length)) and (seconds >= length or length == 1):
            return f"{n} {name}{'s' if n > 1 else ''} ago"
    return "just now" if seconds else ""


class PrefixLog:
    """Completes the engines' reports with what earlier engines have seen, and writes the records.

    folder  the folder for the records, or None to keep no records
    note    called with a message if records cannot be written
    """

    def __init__(self, folder: Path | None = None, note: Callable[[str], None] = lambda words: None) -> None:
        self._folder, self._note = folder, note
        self._has_failed = False
        self._writing = Lock()
        self._known: dict[str, float] = {}  # when a prompt with this beginning was last seen, in Unix time
        if folder is not None:
            for record in read_records(folder).found:
                self._remember(record.report.beginnings, record.time)

    def completed(self, report: PrefixReport) -> PrefixReport:
        """Return the report, with another cause if an earlier engine or a forgotten request had the prompt's beginning.

        The cause is then "engine restarted" or "evicted".
        """
        if report.cause not in (PrefixCause.FIRST, PrefixCause.OTHER_KEY):
            return report
        started = time.time() - report.ago_s
        lengths = [(32 << number, name) for number, name in enumerate(report.beginnings)]
        for length, name in reversed(lengths):
            seen = self._known.get(name)
            if seen is not None and length >= min(_LEAST_KNOWN, report.total // 2) and length > report.reused:
                cause = PrefixCause.RESTARTED if seen < started else PrefixCause.EVICTED
                ago_s = report.ago_s if cause is PrefixCause.RESTARTED else 0.0
                return structs.replace(report, cause=cause, lost=length - report.reused, ago_s=ago_s)
        return report

    def add(self, model: str, agent: str, seconds: float, report: PrefixReport) -> None:
        """Record a finished request, in another thread. Call this method on an event loop."""
        now = time.time()
        self._remember(report.beginnings, now)
        if self._folder is not None:
            record = Record(now, model, shown(agent, _LONGEST_AGENT), round(seconds, 3), report)
            asyncio.get_running_loop().run_in_executor(None, self._append, msgspec.json.encode(record) + b"\n")

    def _remember(self, beginnings: Sequence[str], now: float) -> None:
        for name in beginnings:
            self._known.pop(name, None)
            self._known[name] = now
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _append(self, line: bytes) -> None:
        assert self._folder is not None
        path = self._folder / _NAME
        with self._writing:  # two threads could otherwise replace the older file, the second one by a few records
            self._append_to(path, line)

    def _append_to(self, path: Path, line: bytes) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | O_BINARY | O_NOFOLLOW, 0o600)
            try:
                n_bytes = os.fstat(descriptor).st_size
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
            if n_bytes + len(line) > MOST_BYTES:
                path.replace(_older(path))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._note(f"cannot write the prefix log for `llmrun why`: {path}: {error.strerror or error}")


def read_records(folder: Path) -> Records:
    """Read all records. Files that cannot be read have none."""
    found: list[Record] = []
    damaged = 0
    path = folder / _NAME
    for line in (*_lines(_older(path)), *_lines(path)):
        try:
            record = msgspec.json.decode(line, type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            damaged += 1
        else:
            if len(line) <= _LONGEST_LINE and _is_sound(record):
                found.append(record)
            else:
                damaged += 1
    return Records(sorted(found, key=lambda record: record.time), damaged)


def _is_sound(record: Record) -> bool:
    report = record.report
    numbers = (record.time, record.seconds, report.total, report.reused, report.lost, report.ago_s)
    return all(0 <= number < _MOST for number in numbers)


def unused_records(now: float) -> list[tuple[Path, int]]:
    """Return the files whose newest record is older than 30 days, with their sizes."""
    found = []
    for path in (prefix_log_folder() / _NAME, _older(prefix_log_folder() / _NAME)):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if now - status.st_mtime > UNUSED_S:
                found.append((path, status.st_size))
    return found


def _older(path: Path) -> Path:
    return path.with_name("prefixes.1.jsonl")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | O_BINARY | O_NONBLOCK)
    except OSError:  # most often, no request has been recorded
        return
    with open(descriptor, "rb") as file:  # noqa: PTH123  pathlib cannot open a descriptor
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading from a pipe might never end
            yield from filter(None, file.read(4 * MOST_BYTES).split(b"\n"))
