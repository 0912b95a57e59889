"""Runs a batch from its input to its output, and continues one that was interrupted."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.jobs.batching.batch import Batch
from llmrun.jobs.batching.driver import Driver, first_error
from llmrun.jobs.batching.files import Stamp, stamp_of
from llmrun.jobs.batching.identity import Admission, Identity
from llmrun.jobs.batching.intake import Intake
from llmrun.jobs.batching.journal import Journal
from llmrun.jobs.batching.records import RecordWriter, is_success
from llmrun.jobs.batching.reporter import Reporter
from llmrun.jobs.batching.resume import check_header, check_lines, successes_in
from llmrun.jobs.batching.tally import Tally
from llmrun.jobs.batching.threads import Halt, in_thread
from llmrun.jobs.batching.work import RunContext, Work
from llmrun.jobs.batching.workers.base import RefusedWorker, Worker

_SYNC_S: Final = 1.0  # how long a finished answer may be lost in a power failure
_SHOW_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    is_complete     whether the output has been written; otherwise, the same command continues the run
    foreign_models  the models that lines named, other than the run's own, which answered them
    """

    tally: Tally
    is_complete: bool
    foreign_models: Sequence[str]


async def run_batch(batch: Batch, workers: Sequence[Worker], reporter: Reporter, stop: asyncio.Event) -> Outcome:
    """Run a batch until it is complete or `stop` is set, and close the workers.

    Raises UsageError for an input that has changed or an output that exists, RefusedWorker, DoesNotFit if the disk is
    full, and the errors of opening a worker. The journal stays, so that the same command continues the run.
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
    """One run."""

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
        """See Outcome."""
        return sorted(self._intake.foreign_models - {self._model})

    def close(self) -> None:
        """Make sure that finished answers survive, and close the journal."""
        if self._opened_journal is not None:
            try:
                if not self.is_complete:
                    self._opened_journal.sync()
            finally:
                self._opened_journal.close()

    async def run(self) -> None:
        """Run the batch to its end."""
        await in_thread(self._halt, self._open_journal)
        if self.is_complete:
            return
        self._batch.check_output(self._journal.header)
        replaced = stamp_of(self._batch.output)  # what appears while a model is loaded must not be replaced
        admission = Admission(mixed=self._batch.mixed, is_alone=len(self._workers) == 1)
        opened = await self._open_first(admission)
        assert admission.expected is not None
        self._model = admission.expected.model
        header = self._header(admission.expected)
        writer = RecordWriter(_digest(header), None if self._batch.mixed else self._model)
        await in_thread(self._halt, lambda: self._prepare(header, writer, replaced))
        work = Work(RunContext(self._intake, self._journal, writer, self.tally, self._halt))
        self.tally.start()
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._sync()), group.create_task(self._show())]
                await Driver(work, admission, self._reporter).run(self._workers, opened)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            await work.close()
        self._reporter.waiting(f"writing {self._batch.output.name}")
        await in_thread(self._halt, self._write_output)

    def _open_journal(self) -> None:
        journal = self._opened_journal = Journal.open(self._batch.output, self._halt.check)
        may_replace = self._batch.force or self._batch.retry_errors
        if not may_replace and journal.is_written(self._halt.check):
            self.tally.lines = self.tally.done = self.tally.resumed = len(journal.places)
            self.tally.failed = sum(not is_success(journal.record(number)) for number in journal.places)
            journal.remove()
            self.is_complete = True

    async def _open_first(self, admission: Admission) -> Mapping[str, str | None]:
        """Open the first worker that can be opened. Its identity is that of the run."""
        for number, worker in enumerate(self._workers, 1):
            self._reporter.waiting(f"opening {worker.name}")
            try:
                return {worker.name: (await admission.open(worker)).fingerprint}
            except RefusedWorker:
                raise
            except LlmrunError as error:
                if number == len(self._workers):
                    raise
                self._reporter.note(f"{error}; continuing with the other workers")
        raise UsageError("a batch needs at least one worker")

    def _header(self, expected: Identity) -> dict[str, Any]:
        """Return everything that decides the answers. In mixed runs, this is only what the user asked for."""
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
        """Begin or continue the journal, and count the lines. `replaced` is the output that there was."""
        batch, journal, check = self._batch, self._journal, self._halt.check
        if batch.force or not batch.may_continue(journal.header):
            kept: Iterable[tuple[int, bytes]] = ()
            if batch.retry_errors and replaced is not None:
                kept = successes_in(batch.output, batch.source, writer, check)
            journal.begin({**header, "replaces": replaced}, kept)
        check_header(journal, header)
        self.tally.lines, self.tally.failed = check_lines(
            *(journal, batch.source, writer),
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
