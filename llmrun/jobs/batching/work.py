"""Distributes the calls of a run to workers, writes the answers to the journal, and counts the lines.

Calls with the same prefix run on one machine, one after another. Files are read in threads that can be stopped, so
Ctrl-C never has to wait for a large file to be read.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from llmrun.jobs.batching.intake import Intake, LineId, ReadLine, RecordWriter, is_success
from llmrun.jobs.batching.journal import Journal
from llmrun.jobs.batching.requests import Call
from llmrun.jobs.batching.workers.base import Reply

Result = TypeVar("Result")


class Stopped(Exception):
    """Raised in a thread that must stop."""


class Halt:
    """Asks threads to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Ask all threads to stop."""
        self._event.set()

    def check(self) -> None:
        """Raise Stopped if this thread should stop. The check takes less than a microsecond."""
        if self._event.is_set():
            raise Stopped


async def in_thread(halt: Halt, work: Callable[[], Result]) -> Result:
    """Run `work`, which calls `halt.check` often, in a thread. On cancellation, wait until the thread has ended."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        halt.set()
        await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()  # the error is probably Stopped, and the result is no longer needed
        raise


@dataclass(slots=True)
class Tally:
    """The counts of a run, which carry over when the run is continued.

    lines      lines of the input that are not blank
    done       lines with a record, including records from before an interruption
    resumed    lines with a record from before an interruption
    failed     lines whose record is an error, including records from before an interruption
    copied     lines that received the answer to an equal line
    calls      calls that this process answered
    ignored    names of request fields that had no effect
    prompt_tokens, cached_tokens, generated_tokens  the tokens of the calls that this process answered
    """

    lines: int = 0
    done: int = 0
    resumed: int = 0
    failed: int = 0
    copied: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ignored: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def count(self, body: Mapping[str, Any]) -> None:
        """Count the tokens of an answer."""
        self.calls += 1
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens += _integer(usage.get("prompt_tokens"))
            self.generated_tokens += _integer(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            self.cached_tokens += _integer(details.get("cached_tokens")) if isinstance(details, dict) else 0

    @property
    def seconds(self) -> float:
        """The seconds since the first call of this process."""
        return time.monotonic() - self.began

    @property
    def per_second(self) -> float:
        """The number of lines that this process finishes per second."""
        return (self.done - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """The predicted seconds until all lines are done, or None if a prediction is not possible yet."""
        return (self.lines - self.done) / self.per_second if self.done > self.resumed else None

    @property
    def cached_share(self) -> float:
        """The share of the prompt tokens that were cached and therefore not computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def _integer(value: Any) -> int:
    return value if type(value) is int else 0


_CUTS = 32  # positions that are compared when a range is divided


@dataclass(eq=False, slots=True)
class Job:
    """A call to answer, and the lines that request the call.

    losses  the number of workers that were lost while they ran the call
    """

    call: Call
    lines: list[LineId] = field(default_factory=list)
    losses: int = 0
    prefix: str = ""


def prefix_of(call: Call) -> str:
    """Return a text. Calls whose prompts share a prefix have texts that share a prefix, as far as templates allow.

    The text is made from the messages rather than from tokens, because a server's tokenizer is unknown to this process.
    """
    body = call.body
    if "prompt" in body:
        return f"prompt {_text(body['prompt'])}"
    before = [_text(body.get(name)) for name in ("tools", "chat_template_kwargs", "reasoning_effort")]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            before += [_text(message.get("role")), _text(message.get("content"))]
    return "\x1f".join(before)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class WorkQueue:
    """The calls that are not assigned to a worker, sorted by their prefixes.

    A worker takes its calls from one range of the sorted calls. When the range is empty, the worker steals half of the
    largest other range, which is divided where two neighbors have the shortest common prefix.
    """

    def __init__(self) -> None:
        self._returned: deque[Job] = deque()
        self._unowned: list[deque[Job]] = []
        self._ranges: dict[Hashable, deque[Job]] = {}

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._unowned)) + sum(map(len, self._ranges.values()))

    def add(self, jobs: Iterable[Job]) -> None:
        """Add calls to the queue."""
        jobs = list(jobs)
        for job in jobs:
            job.prefix = prefix_of(job.call)
        jobs.sort(key=lambda job: job.prefix)
        if jobs:
            self._unowned.append(deque(jobs))

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Put the calls of a lost worker back into the queue, so that workers receive these calls next."""
        self._returned.extend(jobs)

    def take(self, owner: Hashable) -> Job | None:
        """Return the next call for a worker, or None if the queue is empty."""
        if self._returned:
            return self._returned.popleft()
        if not self._ranges.get(owner):
            self._ranges[owner] = self._new_range()
        own = self._ranges[owner]
        return own.popleft() if own else None

    def leave(self, owner: Hashable) -> None:
        """Assign the range of a lost worker to the other workers."""
        left = self._ranges.pop(owner, None)
        if left:
            self._unowned.append(left)

    def _new_range(self) -> deque[Job]:
        if self._unowned:
            return self._unowned.pop(0)
        largest = max(self._ranges.values(), key=len, default=deque())
        cut = _best_cut(largest) if len(largest) > 1 else 0
        return deque(reversed([largest.pop() for _ in range(len(largest) - cut)]))


def _best_cut(jobs: Sequence[Job]) -> int:
    """Return the index that divides sorted calls: the shortest common prefix of neighbors in the middle half."""
    first, last = max(1, len(jobs) // 4), max(2, 3 * len(jobs) // 4)
    step = max(1, (last - first) // _CUTS)
    cuts = sorted(range(first, last, step), key=lambda cut: abs(cut - len(jobs) / 2))
    return min(cuts, key=lambda cut: _common(jobs[cut - 1].prefix, jobs[cut].prefix))


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts, using bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MOST_LOSSES: Final = 5  # after this many lost workers, the call itself is probably the cause
_OK: Final = 200
_MOST_IGNORED: Final = 100  # names of ignored fields to store


class Work:
    """The calls of a run. All methods must be called on one event loop."""

    def __init__(self, intake: Intake, journal: Journal, writer: RecordWriter, tally: Tally, halt: Halt) -> None:
        # The numbers of the lines read so far, in order. By default, none is kept.
        self.read: deque[int] = deque(maxlen=0)
        self._intake, self._journal, self._writer, self._tally = intake, journal, writer, tally
        self._queue = WorkQueue()
        self._unfinished: dict[bytes, Job] = {}  # Maps the keys of calls to their jobs.
        self._finished: dict[bytes, int] = {}  # Maps each call's key to the number of a line that has its answer.
        self._n_running = 0
        self._halt = halt
        self._is_read = False
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """True if all lines are done."""
        return self._over.is_set()

    async def next(self, owner: Hashable) -> Job | None:
        """Return the next call for a worker, or None once all lines are done.

        Waits while other workers run the last calls, because a call returns to the queue if its worker is lost.
        """
        while True:
            job = self._queue.take(owner)
            if job is not None:
                self._n_running += 1
                return job
            if not self._is_read:
                # When a worker is lost, its tasks are cancelled, but the window must not be lost with them.
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
        """Run a coroutine and return its result, or cancel the coroutine and return None once all lines are done."""
        task, over = asyncio.create_task(doing), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, over):
                each.cancel()
            await asyncio.wait((task, over))

    def finish(self, job: Job, reply: Reply, fingerprint: str | None) -> None:
        """Write the records of an answered call. Raises DoesNotFit if the disk is full."""
        if reply.status == _OK:
            self._tally.count(reply.body)
        self._tally.copied += len(job.lines) - 1
        if len(self._tally.ignored) < _MOST_IGNORED:
            self._tally.ignored.update(reply.ignored)
        records = [self._writer.answered(line, job.call, reply, fingerprint) for line in job.lines]
        self._end(job, records, has_failed=reply.status != _OK)

    async def close(self) -> None:
        """Stop reading the input."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def give_back(self, job: Job) -> None:
        """Put a call that has not been answered back into the queue."""
        self._n_running -= 1
        self._queue.put_back([job])
        self._news.set()

    def lose(self, job: Job) -> None:
        """Requeue a call whose worker was lost. A call fails once it has lost several workers."""
        job.losses += 1
        if job.losses < _MOST_LOSSES:
            self.give_back(job)
            return
        words = f"{job.losses} workers were lost while they ran this request"
        records = [self._writer.failed(line, "worker_lost", words) for line in job.lines]
        self._end(job, records, has_failed=True)

    def leave(self, owner: Hashable) -> None:
        """Assign the calls that were reserved for a lost worker to the other workers."""
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
        self.read.extend(line.id.number for line in window)
        # Finished lines are read first, so that their answers are known when an equal line needs them.
        fresh = [line for line in window if not self._note_finished(line)]
        self._queue.add([job for line in fresh if (job := self._new_job(line)) is not None])
        self._is_read = not window
        self._reading = None  # after an error, the task is kept, so that the next caller raises the error
        self._news.set()

    def _note_finished(self, line: ReadLine) -> bool:
        if line.id.number not in self._journal.places:
            return False
        self._finished.setdefault(line.call.key, line.id.number)
        return True

    def _new_job(self, line: ReadLine) -> Job | None:
        """Return the job for a line, or None if the line needs no job."""
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
