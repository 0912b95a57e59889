"""Keeps the workers of a run busy, and opens them again when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from llmrun.base.errors import LlmrunError
from llmrun.jobs.batching.identity import Admission
from llmrun.jobs.batching.reporter import Reporter
from llmrun.jobs.batching.work import Work
from llmrun.jobs.batching.workers.base import RefusedWorker, Worker, WorkerLost

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before the attempts to open a worker; the last one repeats
_ATTEMPTS: Final = 5  # after which a run ends if no other worker is there


class Driver:
    """Gives work to workers until it is done."""

    def __init__(self, work: Work, admission: Admission, reporter: Reporter) -> None:
        self._work = work
        self._admission = admission
        self._reporter = reporter
        self._employed: set[str] = set()  # the names of the workers that were not refused
        self._busy: set[str] = set()  # those of them that are open
        self._answered: dict[str, int] = {}  # by their names, the calls that they answered since they were opened

    async def run(self, workers: Sequence[Worker], opened: Mapping[str, str | None]) -> None:
        """Run until all lines are done.

        opened  the workers that are already open, by their names, with the fingerprints for their records

        Raises the first error that ends the run, such as DoesNotFit for a full disk, or the error of the last worker.
        """
        self._employed = {worker.name for worker in workers}
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._employ(worker, opened))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _employ(self, worker: Worker, opened: Mapping[str, str | None]) -> None:
        """Keep one worker busy until all work is done or the worker is of no use."""
        is_open, fingerprint = worker.name in opened, opened.get(worker.name)
        failures = 0  # in a row, of opening the worker or of getting any answer from it
        while not self._work.is_over:
            try:
                if not is_open:
                    fingerprint = await self._open(worker)
                is_open = False
                await self._serve(worker, fingerprint)
                return
            except RefusedWorker as error:
                await worker.close()
                self._employed.discard(worker.name)
                if not self._employed and not self._work.is_over:
                    raise
                self._reporter.note(f"{error}; {error.hint}" if error.hint else str(error))
                return
            except WorkerLost as error:
                failures = 0 if self._answered.pop(worker.name, 0) else failures + 1
                if failures <= 1:
                    self._reporter.note(str(error))
                await self._pause(failures, error)

    async def _open(self, worker: Worker) -> str | None:
        """Open a worker, and return the fingerprint for its records. Raises WorkerLost and RefusedWorker."""
        try:
            admitted = await self._work.unless_over(self._admission.open(worker))
        except RefusedWorker:
            raise
        except LlmrunError as error:
            raise WorkerLost(f"{_named(worker, error)}; trying again", hint=error.hint) from error
        return None if admitted is None else admitted.fingerprint

    async def _pause(self, failures: int, lost: WorkerLost) -> None:
        """Wait before the next attempt to open a worker, unless all work is done.

        Raises the reason of the loss after several attempts if no other worker is there.
        """
        if failures >= _ATTEMPTS and not self._busy and not self._work.is_over:
            reason = lost.__cause__ if isinstance(lost.__cause__, LlmrunError) else lost
            again = "run the same command again to continue"
            hint = f"{reason.hint}; then {again}" if reason.hint else again
            raise type(reason)(f"no worker is left: {reason}", hint=hint) from lost
        if failures:
            await self._work.unless_over(asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1]))

    async def _serve(self, worker: Worker, fingerprint: str | None) -> None:
        """Give calls to an open worker until all work is done. Raises WorkerLost, and errors that end the run."""
        self._busy.add(worker.name)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(worker.slots):
                    group.create_task(self._fill_slot(worker, fingerprint))
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, WorkerLost):
                raise WorkerLost(f"{error}; the worker is lost, and its requests will run again") from errors
            raise error from errors
        finally:
            self._busy.discard(worker.name)
            self._work.leave(worker.name)

    async def _fill_slot(self, worker: Worker, fingerprint: str | None) -> None:
        while (job := await self._work.next(worker.name)) is not None:
            try:
                reply = await worker.answer(job.call.url, job.call.body)
            except WorkerLost:
                self._work.lose(job)
                raise
            except BaseException:
                self._work.give_back(job)
                raise
            self._answered[worker.name] = self._answered.get(worker.name, 0) + 1
            self._work.finish(job, reply, fingerprint)


def _named(worker: Worker, error: LlmrunError) -> str:
    """Return the message of an error, which begins with the name of the worker."""
    words = str(error)
    return words if words.startswith(worker.name) else f"{worker.name}: {words}"


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in nested groups. Errors that end a run take precedence over a lost worker."""
    found: list[BaseException] = []
    waiting: list[BaseException] = [errors]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            found.append(error)
    return next((error for error in found if not isinstance(error, WorkerLost)), found[0])
