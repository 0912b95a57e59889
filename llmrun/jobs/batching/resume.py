"""Continues an interrupted run: compares its journal with the present input, model and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.formats.gguf.problems import shown
from llmrun.jobs.batching.intake import survey
from llmrun.jobs.batching.journal import Journal, read_records
from llmrun.jobs.batching.lines import Line
from llmrun.jobs.batching.records import RecordWriter, is_success

_AGAIN = "use the original input, model and options to continue, or add --force to start over"
# The values in a journal's header that decide answers, and the words of messages about a difference.
_DECISIVE = {
    "model": "a different model",
    "context_size": "a different context size",
    "fingerprint": "a model file or an llmrun version with a different fingerprint",
    "seed": "a different seed",
    "options": "different options",
    "mixed": "a different choice of --mixed",
}


def check_header(journal: Journal, header: Mapping[str, Any]) -> None:
    """Raise UsageError if the journal belongs to a run that would give other answers."""
    for name, words in _DECISIVE.items():
        before, now = journal.header_value(name), header.get(name)
        if before != now:
            values = f"{shown(str(before))} before, {shown(str(now))} now"
            if isinstance(before, dict) and isinstance(now, dict):
                values = ", ".join(sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)))
            raise UsageError(f"{journal.path}: the interrupted run used {words}: {values}", hint=_AGAIN)


def check_lines(
    journal: Journal,
    source: Path,
    writer: RecordWriter,
    *,
    retry_errors: bool,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Compare the records of a journal with the input, and drop those to retry.

    check     called for every line; may raise an exception to stop
    progress  called with the number of lines so far
    Returns the number of lines in the input, and the number of records that are errors. Raises UsageError if a line
    that has a record was changed or removed.
    """
    unseen = set(journal.places)
    failed = total = 0

    def compare(line: Line) -> None:
        nonlocal failed
        if line.number not in unseen:
            return
        unseen.discard(line.number)
        record = journal.record(line.number)
        if not record.startswith(b'{"id": "%s"' % writer.record_id(line.number, line.digest).encode()):
            raise UsageError(
                f"{source}: line {line.number:,} was changed after an earlier run had answered it", hint=_AGAIN
            )
        if is_success(record):
            return
        if retry_errors:
            journal.drop(line.number)
        else:
            failed += 1

    for total in survey(source, compare, check):
        progress(total)
    if unseen:
        number = min(unseen)
        raise UsageError(f"{source}: line {number:,} is missing, although an earlier run has answered it", hint=_AGAIN)
    return total, failed


def successes_in(
    output: Path, source: Path, writer: RecordWriter, check: Callable[[], None]
) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a complete output that are not errors, with the numbers of their lines.

    check  called for every line; may raise an exception to stop
    Raises UsageError if the output was not made from this input by this model with these options.
    """
    numbers: dict[str, int] = {}

    def number(line: Line) -> None:
        numbers[writer.record_id(line.number, line.digest)] = line.number

    for _ in survey(source, number, check):
        check()
    for record in read_records(output):
        check()
        record_id = record[8:].partition(b'"')[0].decode(errors="replace")
        try:
            is_good = is_success(record)
        except ValueError:
            raise UsageError(f"{output}: not an output of llmrun batch") from None
        if record_id not in numbers:
            raise UsageError(
                f"{output}: not made from {source} by this model with these options",
                hint="use the same input, model and options, including --ctx-size, or add --force to start over",
            )
        if is_good:
            yield numbers[record_id], record
