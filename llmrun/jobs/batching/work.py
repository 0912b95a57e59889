"""The work of a run: hands out the calls of its lines, and writes their answers to the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from llmrun.jobs.batching.intake import Intake, ReadLine
from llmrun.jobs.batching.journal import Journal
from llmrun.jobs.batching.ordering import Job, WorkQueue
from llmrun.jobs.batching.records import LineId, RecordWriter, is_success
from llmrun.jobs.batching.tally import Tally
from llmrun.jobs.batching.threads import Halt, in_thread
from llmrun.jobs.batching.workers.base import Reply

Result = TypeVar("Result")

_MOST_LOSSES: Final = 5  # of a call's workers, after which the call is probably the reason
_OK: Final = 200
_MOST_IGNORED: Final = 100  # names


@dataclass(frozen=True, slots=True)
class RunContext:
    """The shared state of a run: its input, journal, record writer, tally and stop flag."""

    intake: Intake
    journal: Journal
    writer: RecordWriter
    tally: Tally
    halt: Halt


class Work:
    """The calls of a run. All methods must be called on one event loop."""

    def __init__(self, context: RunContext) -> None:
        self._intake, self._journal, self._writer, self._tally = (
            context.intake,
            context.journal,
            context.writer,
            context.tally,
        )
        self._queue = WorkQueue()
        self._unfinished: dict[bytes, Job] = {}  # by the keys of their calls
        self._finished: dict[bytes, int] = {}  # by the key of a call, the number of a line that has its answer
        self._n_running = 0
        self._halt = context.halt
        self._is_read = False
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether all lines are done."""
        return self._over.is_set()

    async def next(self, owner: Hashable) -> Job | None:
        """Return the next call for a worker, or None once all lines are done.

        Waits as long as other workers run the last calls, because these come back if a worker is lost.
        """
        while True:
            job = self._queue.take(owner)
            if job is not None:
                self._n_running += 1
                return job
            if not self._is_read:
                # The slots of a worker are cancelled when it is lost, but the window must not be lost with them.
                self._reading = self._reading or asyncio.create_task(self._read_window())
                await asyncio.shield(self._reading)
            elif self._n_running:
                self._news.clear()
                await self._news.wait()
            else:
                self._news.set()
                self._over.set()
                return None

    async def unless_over(self, doing: Coroutine[Any, Any, Result]) -> Result | None:
        """Run a coroutine and return its result, but cancel it and return None once all lines are done."""
        task, over = asyncio.create_task(doing), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, over):
                each.cancel()
            await asyncio.wait((task, over))

    def finish(self, job: Job, reply: Reply, fingerprint: str | None) -> None:
        """Write the records of a call that was answered. Raises DoesNotFit if the disk is full."""
        if reply.status == _OK:
            self._tally.count(reply.body)
        self._tally.copied += len(job.lines) - 1
        if len(self._tally.ignored) < _MOST_IGNORED:
            self._tally.ignored.update(reply.ignored)
        records = [self._writer.answered(line, job.call, reply, fingerprint) for line in job.lines]
        self._end(job, records, has_failed=reply.status != _OK)

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def give_back(self, job: Job) -> None:
        """Return a call that has not been answered."""
        self._n_running -= 1
        self._queue.put_back([job])
        self._news.set()

    def lose(self, job: Job) -> None:
        """Return a call whose worker was lost. A call that loses one worker after another fails."""
        job.losses += 1
        if job.losses < _MOST_LOSSES:
            self.give_back(job)
            return
        words = f"{job.losses} workers were lost while they ran this request"
        records = [self._writer.failed(line, "worker_lost", words) for line in job.lines]
        self._end(job, records, has_failed=True)

    def leave(self, owner: Hashable) -> None:
        """Give the calls that were meant for a lost worker to the others."""
        self._queue.leave(owner)
        self._news.set()

    def _end(self, job: Job, records: list[bytes], *, has_failed: bool) -> None:
        self._n_running -= 1
        del self._unfinished[job.call.key]
        for line, record in zip(job.lines, records, strict=True):
            self._write(line, record, has_failed=has_failed)
        self._finished[job.call.key] = job.lines[0].number
        self._news.set()

    def _write(self, line: LineId, record: bytes, *, has_failed: bool) -> None:
        self._journal.add(line.number, record)
        self._tally.done += 1
        self._tally.failed += has_failed

    async def _read_window(self) -> None:
        window = await in_thread(self._halt, self._intake.next_window)
        # Finished lines come first, so that their answers are known when an equal line asks for them.
        fresh = [line for line in window if not self._note_finished(line)]
        self._queue.add([job for line in fresh if (job := self._new_job(line)) is not None])
        self._is_read = not window
        self._reading = None  # after an error, it stays, so that the next slot raises it
        self._news.set()

    def _note_finished(self, line: ReadLine) -> bool:
        if line.id.number not in self._journal.places:
            return False
        if line.call is not None:
            self._finished.setdefault(line.call.key, line.id.number)
        return True

    def _new_job(self, line: ReadLine) -> Job | None:
        """Return the job for a line, or None if it needs none of its own."""
        if line.problem is not None:
            self._write(line.id, self._writer.bad(line.id, line.problem), has_failed=True)
            return None
        assert line.call is not None
        key = line.call.key
        if key in self._finished:
            self._tally.copied += 1
            record = self._writer.copied(line.id, self._journal.record(self._finished[key]))
            self._write(line.id, record, has_failed=not is_success(record))
            return None
        if key in self._unfinished:
            self._unfinished[key].lines.append(line.id)
            return None
        job = self._unfinished[key] = Job(line.call, [line.id])
        return job
