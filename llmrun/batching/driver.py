"""Keeps the workers of a run busy, and opens them again when they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from llmrun.batching.identity import Admission, RefusedWorker
from llmrun.batching.reporter import Reporter
from llmrun.batching.work import Work
from llmrun.batching.workers.base import Worker, WorkerLost
from llmrun.errors import LlmrunError

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before the attempts to open a worker; the last one repeats
_ATTEMPTS: Final = 5  # after which a run ends if no other worker is there


class Driver:
    """Gives work to workers until it is done."""

    def __init__(self, work: Work, admission: Admission, reporter: Reporter) -> None:
        self._work = work
        self._admission = admission
        self._reporter = reporter
        self._busy: set[str] = set()  # the names of the workers that are open

    async def run(self, workers: Sequence[Worker], opened: Mapping[str, str | None]) -> None:
        """Run until all lines are done.

        opened  the workers that are already open, by their names, with the fingerprints for their records

        Raises the first error that ends the run, such as DoesNotFit for a full disk, or the error of the last worker.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._employ(worker, opened))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _employ(self, worker: Worker, opened: Mapping[str, str | None]) -> None:
        """Keep one worker busy until all work is done or the worker is refused."""
        is_open = worker.name in opened
        fingerprint = opened.get(worker.name)
        while True:
            if not is_open:
                is_open, fingerprint = await self._open(worker)
            if not is_open:
                return
            lost = await self._serve(worker, fingerprint)
            if lost is None:
                return
            is_open = False
            self._reporter.note(f"lost a worker, its requests run again: {lost}")

    async def _open(self, worker: Worker) -> tuple[bool, str | None]:
        """Open a worker, in several attempts if necessary.

        Returns whether it is open, and the fingerprint for its records. It is not if all work was done meanwhile, or if
        it is refused while others are working. Raises the error of the last worker.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                opened = await self._work.unless_over(self._admission.open(worker))
                return (False, None) if opened is None else (True, opened.fingerprint)
            except RefusedWorker as error:
                await worker.close()
                if not self._busy:
                    raise
                self._reporter.note(f"{error}; {error.hint}")
                return False, None
            except LlmrunError as error:
                if attempt >= _ATTEMPTS and not self._busy:
                    hint = "run the same command again to continue"
                    raise type(error)(f"no worker is left: {error}", hint=hint) from error
                if attempt == 1:
                    self._reporter.note(f"{worker.name}: cannot be reached, trying again: {error}")
            await self._work.unless_over(asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S)) - 1]))

    async def _serve(self, worker: Worker, fingerprint: str | None) -> WorkerLost | None:
        """Give calls to an open worker until all work is done, or return how the worker was lost."""
        self._busy.add(worker.name)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(worker.slots):
                    group.create_task(self._fill_slot(worker, fingerprint))
            return None
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            if not isinstance(error, WorkerLost):
                raise error from errors
            return error
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
            self._work.finish(job, reply, fingerprint)


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
