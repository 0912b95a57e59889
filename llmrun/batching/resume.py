"""Continues an interrupted run: compares its journal with the input, the model and the options of today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmrun.batching.intake import survey
from llmrun.batching.journal import Journal, read_records
from llmrun.batching.lines import Line
from llmrun.batching.records import RecordWriter, is_success
from llmrun.errors import UsageError
from llmrun.gguf.problems import shown

_AGAIN = "to start again, add --force"
# What a journal's header says about its run, and what messages say if it differs.
_DECISIVE = {
    "model": "another model",
    "fingerprint": "another fingerprint of the model",
    "seed": "another seed",
    "options": "other options for the answers",
    "mixed": "another choice of --mixed",
}


def check_header(journal: Journal, header: Mapping[str, Any]) -> None:
    """Raise UsageError if the journal belongs to a run that would give other answers."""
    assert journal.header is not None
    for name, words in _DECISIVE.items():
        before, now = journal.header.get(name), header.get(name)
        if before != now:
            values = "" if isinstance(now, dict) else f": {shown(str(before))} before, {shown(str(now))} now"
            raise UsageError(f"{journal.path}: the run began with {words}{values}", hint=_AGAIN)


def check_lines(
    journal: Journal, source: Path, writer: RecordWriter, retry_errors: bool, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Compare the records of a journal with the input, and drop those to retry.

    Returns the number of lines in the input, and the number of records that are errors.

    Raises UsageError if a line that has a record was changed or removed.
    """
    unseen = set(journal.places)
    failed = total = 0

    def check(line: Line) -> None:
        nonlocal failed
        if line.number not in unseen:
            return
        unseen.discard(line.number)
        record = journal.record(line.number)
        if not record.startswith(b'{"id": "%s"' % writer.record_id(line.number, line.digest).encode()):
            raise UsageError(
                f"{source}: line {line.number:,} was changed after an earlier run had answered it",
                hint=_AGAIN,
            )
        if is_success(record):
            return
        if retry_errors:
            journal.drop(line.number)
        else:
            failed += 1

    for total in survey(source, check):
        progress(total)
    if unseen:
        number = min(unseen)
        raise UsageError(f"{source}: line {number:,} is missing, although an earlier run has answered it", hint=_AGAIN)
    return total, failed


def take_from_output(journal: Journal, output: Path, source: Path, writer: RecordWriter) -> None:
    """Fill a new journal with the successful records of a complete output, so that only the errors run again.

    Raises UsageError if the output was not made from this input by this model with these options.
    """
    numbers: dict[str, int] = {}

    def number(line: Line) -> None:
        numbers[writer.record_id(line.number, line.digest)] = line.number

    for _ in survey(source, number):
        pass
    for record in read_records(output):
        record_id = record[8:].partition(b'"')[0].decode(errors="replace")
        try:
            is_good = is_success(record)
        except ValueError:
            raise UsageError(f"{output}: not an output of llmrun batch") from None
        if record_id not in numbers:
            raise UsageError(
                f"{output}: not made from {source} by this model with these options", hint="give the same options"
            )
        if is_good:
            journal.add(numbers[record_id], record)
