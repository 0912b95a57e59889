"""Runs a batch from its input to its output, and continues an interrupted run.

An interrupted run continues only if the run's journal matches the current input, model and options.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import LlmrunError, UsageError, shown
from llmrun.jobs.batching.driver import Admission, Driver, Identity, Reporter, first_error
from llmrun.jobs.batching.intake import Intake, RecordWriter, is_success, survey
from llmrun.jobs.batching.journal import Journal, Stamp, journal_path, read_records, stamp_of
from llmrun.jobs.batching.requests import CallOptions, Line, check_source
from llmrun.jobs.batching.work import Halt, Tally, Work, in_thread
from llmrun.jobs.batching.workers.base import RefusedWorker, Worker


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to run.

    source, output  the input and the output; the output must not be a link (see `journal.resolved`)
    model         the user's name for the model, or "" if only servers know the name
    mixed         accept workers whose answers may differ
    retry_errors  rerun the lines whose records are errors
    force         start over, and replace an existing output
    emit          called with the records in order while the run lasts, in any thread, and with b"" now and then;
                  `output` is then not written, and no other process may know its name. None to write `output`
    """

    source: Path
    output: Path
    options: CallOptions
    model: str = ""
    mixed: bool = False
    retry_errors: bool = False
    force: bool = False
    emit: Callable[[bytes], None] | None = None

    def check_files(self) -> None:
        """Raise UsageError if the input cannot be read or the output cannot be written."""
        source, output, journal = self.source, self.output, journal_path(self.output)
        check_source(source, has_template=self.options.fill is not None)
        if not output.parent.is_dir():
            raise UsageError(f"{output}: the folder {output.parent} does not exist")
        for path in (output, journal):
            if path.exists() and path.samefile(source):
                raise UsageError(f"{path}: the output must not be the input")
        if output.exists() and not output.is_file():
            raise UsageError(f"{output}: not a file")
        if not os.path.lexists(journal):
            self.check_output(None)

    def check_output(self, header: Mapping[str, Any] | None) -> None:
        """Raise UsageError if an output exists that this run must not replace.

        header  the header of the run's journal, or None if the run has no journal

        With --force or --retry-errors, a run may replace an output that existed when the run began.
        """
        if self.output.exists() and not (self.force or self.retry_errors or self.may_continue(header)):
            hint = "--retry-errors reruns failed lines, --force replaces the file"
            raise UsageError(f"{self.output}: the file exists", hint=hint)

    def may_continue(self, header: Mapping[str, Any] | None) -> bool:
        """Return whether the journal belongs to a run that may replace the existing output, if an output exists."""
        return header is not None and header.get("replaces") == stamp_of(self.output)


_AGAIN = "use the original input, model and options to continue, or add --force to start over"
# Maps the header values that determine the answers to the words that describe a difference in messages.
_DECISIVE = {
    "model": "a different model",
    "context_size": "a different context size",
    "fingerprint": "a model file or an llmrun version with a different fingerprint",
    "seed": "a different seed",
    "options": "different options",
    "mixed": "a different choice of --mixed",
}


def check_header(journal: Journal, header: Mapping[str, Any]) -> None:
    """Raise UsageError if the journal belongs to a run whose answers would differ."""
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
    options: CallOptions,
    writer: RecordWriter,
    *,
    retry_errors: bool,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Compare the records of a journal with the input, and drop the records of lines to retry.

    check     called for every line; may raise an exception to stop
    progress  called with the number of lines so far
    Returns the number of lines in the input, and the number of records that are errors. Raises UsageError if a line
    with a record was changed or removed.
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

    for total in survey(source, options, compare, check):
        progress(total)
    if unseen:
        number = min(unseen)
        raise UsageError(f"{source}: line {number:,} is missing, although an earlier run has answered it", hint=_AGAIN)
    return total, failed


def successes_in(
    output: Path, source: Path, options: CallOptions, writer: RecordWriter, check: Callable[[], None]
) -> Iterator[tuple[int, bytes]]:
    """Yield the records in a complete output that are not errors, with their line numbers.

    check  called for every line; may raise an exception to stop
    Raises UsageError if the output was not generated from this input by this model with these options.
    """
    numbers: dict[str, int] = {}

    def number(line: Line) -> None:
        numbers[writer.record_id(line.number, line.digest)] = line.number

    for _ in survey(source, options, number, check):
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


_SYNC_S: Final = 1.0  # maximum time for which a power failure can lose a finished answer
_SHOW_S: Final = 0.2
_EMIT_BYTES: Final = 1 << 20  # a call of `emit` gets few more bytes than this, because the reader may be slow


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    is_complete     True if the output has been written; otherwise, the same command continues the run
    foreign_models  models that lines named but that did not answer, because the run's own model answers all lines
    """

    tally: Tally
    is_complete: bool
    foreign_models: Sequence[str]


async def run_batch(batch: Batch, workers: Sequence[Worker], reporter: Reporter, stop: asyncio.Event) -> Outcome:
    """Run a batch until the batch is complete or `stop` is set, and close the workers.

    Raises UsageError for an input that has changed or an output that exists, RefusedWorker, DoesNotFit if the disk is
    full, and the errors of opening a worker. The journal remains, so the same command continues the run.
    """
    batch.check_files()
    run = _Run(batch, workers, reporter)
    task = asyncio.create_task(run.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.wait((task, stopped))
        await asyncio.gather(*(worker.close() for worker in workers))
        run.close()
    return Outcome(run.tally, run.is_complete, run.foreign_models())


class _Run:
    """The state of one run."""

    def __init__(self, batch: Batch, workers: Sequence[Worker], reporter: Reporter) -> None:
        self._batch = batch
        self._workers = workers
        self._reporter = reporter
        self._halt = Halt()
        self._intake = Intake(batch.source, batch.options, self._halt.check)
        self._opened_journal: Journal | None = None
        self._model = ""
        self.tally = Tally()
        self.is_complete = False

    @property
    def _journal(self) -> Journal:
        assert self._opened_journal is not None
        return self._opened_journal

    def foreign_models(self) -> list[str]:
        """Other models that lines requested, although the run's own model answers all lines."""
        return sorted(self._intake.foreign_models - {self._model})

    def close(self) -> None:
        """Flush finished answers to the disk, and close the journal."""
        if self._opened_journal is not None:
            try:
                if not self.is_complete:
                    self._opened_journal.sync()
            finally:
                self._opened_journal.close()

    async def run(self) -> None:
        """Run the batch until it is complete or stopped."""
        await in_thread(self._halt, self._open_journal)
        if self.is_complete:
            return
        self._batch.check_output(self._journal.header)
        replaced = stamp_of(self._batch.output)  # a file that appears while a model is loading must not be replaced
        admission = Admission(mixed=self._batch.mixed, is_alone=len(self._workers) == 1)
        opened = await self._open_first(admission)
        assert admission.expected is not None
        self._model = admission.expected.model
        header = self._header(admission.expected)
        writer = RecordWriter(_digest(header), None if self._batch.mixed else self._model)
        await in_thread(self._halt, lambda: self._prepare(header, writer, replaced))
        work = Work(self._intake, self._journal, writer, self.tally, self._halt)
        if self._batch.emit is not None:
            work.read = deque()
        self.tally.start()
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._sync()), group.create_task(self._show())]
                group.create_task(self._emit(work))
                await Driver(work, admission, self._reporter).run(self._workers, opened)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            await work.close()
        if self._batch.emit is not None:
            self._journal.remove()
            self.is_complete = True
            return
        self._reporter.waiting(f"writing {self._batch.output.name}")
        await in_thread(self._halt, self._write_output)

    def _open_journal(self) -> None:
        journal = self._opened_journal = Journal.open(
            self._batch.output, self._halt.check, is_private=self._batch.emit is not None
        )
        may_replace = self._batch.force or self._batch.retry_errors
        if not may_replace and journal.is_written(self._halt.check):
            self.tally.lines = self.tally.done = self.tally.resumed = len(journal.places)
            self.tally.failed = sum(not is_success(journal.record(number)) for number in journal.places)
            journal.remove()
            self.is_complete = True

    async def _open_first(self, admission: Admission) -> Mapping[str, str | None]:
        """Open the first worker that can be opened. This worker's identity becomes the identity of the run."""
        for number, worker in enumerate(self._workers, 1):
            self._reporter.waiting(f"opening {worker.name}")
            try:
                return {worker.name: await admission.open(worker)}
            except RefusedWorker:
                raise
            except LlmrunError as error:
                if number == len(self._workers):
                    raise
                self._reporter.note(f"{error}; continuing with the other workers")
        raise UsageError("a batch needs at least one worker")

    def _header(self, expected: Identity) -> dict[str, Any]:
        """Return everything that determines the answers. In mixed runs, only the user's options count."""
        options, mixed = self._batch.options, self._batch.mixed
        return {
            "model": self._batch.model if mixed else expected.model,
            "context_size": None if mixed else expected.context_size,
            "fingerprint": None if mixed else expected.fingerprint,
            "seed": options.seed,
            "options": options.as_json(),
            "mixed": mixed,
        }

    def _prepare(self, header: Mapping[str, Any], writer: RecordWriter, replaced: Stamp | None) -> None:
        """Begin or continue the journal, and count the lines. `replaced` is the stamp of the output before the run."""
        batch, journal, check = self._batch, self._journal, self._halt.check
        if batch.force or not batch.may_continue(journal.header):
            kept: Iterable[tuple[int, bytes]] = ()
            if batch.retry_errors and replaced is not None:
                kept = successes_in(batch.output, batch.source, batch.options, writer, check)
            journal.begin({**header, "replaces": replaced}, kept)
        check_header(journal, header)
        self.tally.lines, self.tally.failed = check_lines(
            journal,
            batch.source,
            batch.options,
            writer,
            retry_errors=batch.retry_errors,
            check=check,
            progress=lambda count: self._reporter.waiting(f"reading {batch.source.name}: {count:,} lines"),
        )
        self.tally.resumed = self.tally.done = len(journal.places)

    def _write_output(self) -> None:
        missing = self.tally.lines - len(self._journal.places)
        if missing > 0:
            raise LlmrunError(f"bug in llmrun: {missing:,} lines have no answer", hint="run the same command again")
        self._journal.write_output(self._halt.check)
        self.is_complete = True

    async def _emit(self, work: Work) -> None:
        """Emit each record once all earlier records are emitted, until all lines are done."""
        while self._batch.emit is not None:
            was_over, data = work.is_over, bytearray()
            while work.read and work.read[0] in self._journal.places and len(data) < _EMIT_BYTES:
                data += self._journal.record(work.read.popleft()) + b"\n"
            await asyncio.to_thread(self._batch.emit, bytes(data))
            if not data:
                if was_over:
                    return
                await asyncio.sleep(_SHOW_S)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            await asyncio.to_thread(self._journal.sync)

    async def _show(self) -> None:
        while True:
            self._reporter.progress(self.tally)
            await asyncio.sleep(_SHOW_S)


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
