"""Runs a batch from its input to its output, and continues one that was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmrun.batching.driver import Driver, first_error
from llmrun.batching.identity import Admission, RefusedWorker
from llmrun.batching.intake import Intake
from llmrun.batching.journal import Journal
from llmrun.batching.records import RecordWriter
from llmrun.batching.reporter import Reporter
from llmrun.batching.requests import CallOptions
from llmrun.batching.resume import check_header, check_lines, take_from_output
from llmrun.batching.tally import Tally
from llmrun.batching.work import Desk, Work
from llmrun.batching.workers.base import Worker
from llmrun.errors import LlmrunError, UsageError

_SYNC_S: Final = 1.0  # how long a finished answer may be lost in a power failure
_SHOW_S: Final = 0.2
_MIXED: Final = "mixed"


@dataclass(frozen=True, slots=True)
class Batch:
    """What to run.

    mixed         accept workers whose answers may differ
    retry_errors  run the lines again whose records are errors
    force         start again, and replace an output that exists
    """

    source: Path
    output: Path
    options: CallOptions
    mixed: bool = False
    retry_errors: bool = False
    force: bool = False

    def check_files(self) -> None:
        """Raise UsageError if the input cannot be read or the output cannot be written."""
        source, output = self.source, self.output
        if not source.exists():
            raise UsageError(f"{source}: no such file")
        if not source.is_file():
            raise UsageError(
                f"{source}: not a file", hint="a continued run reads the input again, so it must be a file"
            )
        if not output.parent.is_dir():
            raise UsageError(f"{output}: the folder {output.parent} does not exist")
        if not output.exists():
            return
        if not output.is_file():
            raise UsageError(f"{output}: not a file")
        if output.samefile(source):
            raise UsageError(f"{output}: the output must not be the input")
        if not (self.force or self.retry_errors):
            raise UsageError(
                f"{output}: the file exists", hint="--retry-errors runs its errors again, --force replaces it"
            )


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
    with contextlib.closing(Journal.open(batch.output)) as journal:
        run = _Run(batch, journal, workers, reporter)
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
            journal.sync()
        return Outcome(run.tally, run.is_complete, run.foreign_models())


class _Run:
    """One run with an open journal."""

    def __init__(self, batch: Batch, journal: Journal, workers: Sequence[Worker], reporter: Reporter) -> None:
        self._batch = batch
        self._journal = journal
        self._workers = workers
        self._reporter = reporter
        self._intake = Intake(batch.source, batch.options)
        self._model = ""
        self.tally = Tally()
        self.is_complete = False

    def foreign_models(self) -> list[str]:
        """See Outcome."""
        return sorted(self._intake.foreign_models - {self._model})

    async def run(self) -> None:
        """Run the batch to its end."""
        admission = Admission(mixed=self._batch.mixed, is_alone=len(self._workers) == 1)
        opened = await self._open_first(admission)
        assert admission.expected is not None
        self._model = admission.expected.model
        header = self._header(self._model, admission.expected.fingerprint)
        writer = RecordWriter(_digest(header), None if self._batch.mixed else self._model)
        await asyncio.to_thread(self._prepare, header, writer)
        work = Work(Desk(self._intake, self._journal, writer, self.tally))
        self.tally.start()
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._sync()), group.create_task(self._show())]
                await Driver(work, admission, self._reporter).run(self._workers, opened)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        await asyncio.to_thread(self._journal.write_output, self._batch.output)
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
                self._reporter.note(f"{worker.name}: {error}")
        raise UsageError("a batch needs at least one worker")

    def _header(self, model: str, fingerprint: str) -> dict[str, Any]:
        options, mixed = self._batch.options, self._batch.mixed
        return {
            "model": _MIXED if mixed else model,
            "fingerprint": _MIXED if mixed else fingerprint,
            "seed": options.seed,
            "options": options.as_json(),
            "mixed": mixed,
        }

    def _prepare(self, header: Mapping[str, Any], writer: RecordWriter) -> None:
        """Begin or continue the journal, and count the lines."""
        batch, journal = self._batch, self._journal
        if journal.header is None or batch.force:
            journal.begin(header)
            if batch.retry_errors:
                take_from_output(journal, batch.output, batch.source, writer)
        check_header(journal, header)
        self.tally.lines, self.tally.failed = check_lines(
            *(journal, batch.source, writer, batch.retry_errors),
            lambda count: self._reporter.waiting(f"reading {batch.source.name}: {count:,} lines"),
        )
        self.tally.resumed = self.tally.done = len(journal.places)

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
