"""Keeps the workers of a run busy, and reopens lost workers.

Each worker is identified before it receives calls. A worker whose answers may differ from the other workers' answers is
refused, unless --mixed is given. `Reporter` is the interface through which a batch reports its progress.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.engine.remote.client import OWNER
from llmrun.jobs.batching.requests import Call
from llmrun.jobs.batching.work import Tally, Work
from llmrun.jobs.batching.workers.base import COMPLETION, RefusedWorker, Reply, Worker, WorkerLost
from llmrun.serving.protocol.errors import api_error, openai_body

# The log-probabilities of these tokens have all digits of the logits, so a single different bit would be visible.
_PROOF: Final[Mapping[str, Any]] = {
    "prompt": "Once upon a time, there were three machines. The first one said: 1, 2, 3, 5, 8, 13,",
    "max_tokens": 16,
    "temperature": 0,
    "logprobs": 5,
    "seed": 1,
}
_DIGITS: Final = 16
_OK: Final = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties of a worker that determine its answers.

    model        the name of the worker's model
    context_size  the maximum number of tokens of a prompt and its answer together, or None if it is unknown
    fingerprint  equal for workers that give the same answers if their contexts have the same size
    is_certain   True if answers do not depend on concurrent requests, so that equal fingerprints mean equal answers
    is_foreign   True if the worker is a program other than llmrun, so that nothing about its answers is known
    """

    model: str
    context_size: int | None
    fingerprint: str
    is_certain: bool = True
    is_foreign: bool = False


class Admission:
    """Opens workers, and refuses workers whose answers may differ from the answers of other workers.

    mixed     accept all workers
    is_alone  True if the run has only one worker
    expected  the identity that all workers must have; if None, the first opened worker sets it
    """

    def __init__(self, *, mixed: bool, is_alone: bool, expected: Identity | None = None) -> None:
        self._mixed = mixed
        self._is_alone = is_alone
        self.expected = expected

    async def open(self, worker: Worker) -> str | None:
        """Open a worker, and return the fingerprint for its records, or None if all workers have the same fingerprint.

        Raises RefusedWorker, and the errors of `Worker.start`.
        """
        identity = await identify(worker, await worker.start())
        if self.expected is None:
            self.expected = identity
        if self._mixed:
            return identity.fingerprint
        hint = "add --mixed to accept such workers"
        if identity.is_foreign:
            words = "the server is not llmrun, so its answers may change from run to run"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        if not identity.is_certain and not self._is_alone:
            words = "answers depend on concurrent requests; answers of the CPU engine do not"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        here, there = identity, self.expected
        if (here.fingerprint, here.context_size) != (there.fingerprint, there.context_size):
            words = f"answers would differ from the first worker's: {_words(here)}; expected {_words(there)}"
            hint = f"use the same model file, llmrun version and --ctx-size everywhere, or {hint}"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        return None


async def identify(worker: Worker, card: Mapping[str, Any]) -> Identity:
    """Return the identity of an open worker. Raises WorkerLost and RefusedWorker.

    card  the worker's entry of /v1/models

    The fingerprint covers the model, the default sampling and the answer to a known prompt.
    """
    name, said, context = str(card.get("id", "")), card.get("system_fingerprint"), card.get("max_model_len")
    size = context if type(context) is int else None
    if card.get("owned_by") != OWNER or not isinstance(said, str):
        return Identity(name, size, _foreign_fingerprint(worker, card), is_certain=False, is_foreign=True)
    if not card.get("batch_invariant"):
        return Identity(name, size, said, is_certain=False)
    reply = await worker.answer(COMPLETION, _PROOF)
    if reply.status != _OK:
        error = reply.body.get("error")
        reason = error.get("message") if isinstance(error, Mapping) else None
        hint = "if the context is too small, set --ctx-size"
        raise RefusedWorker(f"{worker.name}: rejected the test prompt: {reason or f'HTTP {reply.status}'}", hint=hint)
    decisive = [said, card.get("default_sampling"), reply.body.get("choices")]
    return Identity(name, size, f"bits_{_digest(decisive)}")


def _words(identity: Identity) -> str:
    context = "" if identity.context_size is None else f", {identity.context_size:,} tokens of context"
    return f"{identity.model}{context}, fingerprint {identity.fingerprint}"


def _foreign_fingerprint(worker: Worker, card: Mapping[str, Any]) -> str:
    """Return a fingerprint of a foreign server, computed from its /v1/models entry without the timestamps."""
    said = {name: value for name, value in card.items() if name != "created"}
    return f"foreign_{_digest([worker.name, said])}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGITS]


class Reporter(Protocol):
    """Shows what a batch is doing."""

    def progress(self, tally: Tally) -> None:
        """Show the counts of a run. The batch calls this method several times a second."""

    def waiting(self, words: str) -> None:
        """Show what the run is waiting for, such as "opening 10.0.0.7"."""

    def note(self, words: str) -> None:
        """Show a line that the user should read."""


_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # the wait before each attempt; the last value repeats
_ATTEMPTS: Final = 5  # A run ends after this many failed attempts if no other worker is open.


class Driver:
    """Assigns calls to workers until all lines are done."""

    def __init__(self, work: Work, admission: Admission, reporter: Reporter) -> None:
        self._work = work
        self._admission = admission
        self._reporter = reporter
        self._employed: set[str] = set()  # The names of the workers that were not refused.
        self._busy: set[str] = set()  # The names of the workers that are open.
        self._answered: dict[str, int] = {}  # The number of calls that each worker has answered since opening.

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
        """Keep one worker busy until all work is done or the worker cannot be used."""
        is_open, fingerprint = worker.name in opened, opened.get(worker.name)
        failures = 0  # consecutive failures to open the worker or to receive any answer from the worker
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
            return await self._work.unless_over(self._admission.open(worker))
        except RefusedWorker:
            raise
        except LlmrunError as error:
            raise WorkerLost(f"{_named(worker, error)}; trying again", hint=error.hint) from error

    async def _pause(self, failures: int, lost: WorkerLost) -> None:
        """Wait before the next attempt to open a worker, unless all work is done.

        If no other worker is open after several attempts, raises the error that caused the loss.
        """
        if failures >= _ATTEMPTS and not self._busy and not self._work.is_over:
            reason = lost.__cause__ if isinstance(lost.__cause__, LlmrunError) else lost
            again = "run the same command again to continue"
            hint = f"{reason.hint}; then {again}" if reason.hint else again
            raise type(reason)(f"no worker is left: {reason}", hint=hint) from lost
        if failures:
            await self._work.unless_over(asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1]))

    async def _serve(self, worker: Worker, fingerprint: str | None) -> None:
        """Assign calls to an open worker until all work is done. Raises WorkerLost, and errors that end the run."""
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
                reply = await _answered(worker, job.call)
            except WorkerLost:
                self._work.lose(job)
                raise
            except BaseException:
                self._work.give_back(job)
                raise
            self._answered[worker.name] = self._answered.get(worker.name, 0) + 1
            self._work.finish(job, reply, fingerprint)


async def _answered(worker: Worker, call: Call) -> Reply:
    """Return a worker's answer to a call, or an error if the call's images have changed."""
    try:
        body = await asyncio.to_thread(call.whole_body) if call.images else call.body
    except UsageError as error:
        problem = api_error(error)
        return Reply(problem.status, openai_body(problem))
    return await worker.answer(call.url, body)


def _named(worker: Worker, error: LlmrunError) -> str:
    """Return an error's message, prefixed with the name of the worker."""
    words = str(error)
    return words if words.startswith(worker.name) else f"{worker.name}: {words}"


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in nested exception groups. Errors that end a run take precedence over a lost worker."""
    found: list[BaseException] = []
    waiting: list[BaseException] = [errors]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
        else:
            found.append(error)
    return next((error for error in found if not isinstance(error, WorkerLost)), found[0])
