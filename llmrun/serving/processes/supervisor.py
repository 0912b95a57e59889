"""Keeps a process with an open model running: starts the process, watches its steps, and restarts it when it ends.

RestartPauses and StepProgress do not read a clock: their callers pass the times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from llmrun.base.errors import LlmrunError, Overloaded
from llmrun.base.processes import commands
from llmrun.base.processes.child import AsyncChild
from llmrun.base.processes.frames import BadMessage, FrameTooLong
from llmrun.engine.child.messages import (
    FROM_CHILD,
    LONGEST,
    SAVE_S,
    TO_CHILD,
    Beat,
    CannotOpen,
    Close,
    Crashed,
    FromChild,
    Loading,
    Note,
    Open,
    Opened,
    Stepped,
)
from llmrun.engine.requests import ModelFacts
from llmrun.serving.processes.served_model import State

MIB = 1 << 20
_LEAST_LEAVING: Final = 8  # the number of cancelled messages that a tenant may always have, however short the queue is


class Waiting(NamedTuple):
    """A message that waits in the process, or a cancelled message that the process has not dropped yet."""

    tenant: str
    n_bytes: int
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits that protect clients from one another.

    max_queue      the maximum number of requests that wait for their first step, and of other calls
    tenants        the number of tenants; if there are several, each tenant can use at most half of the queue
    queue_bytes    the maximum size of the messages of a tenant's waiting requests; a single request may be larger
    unread_bytes   the maximum size of an answer's unread events
    stuck_s        the time without a step after which the engine is restarted, if its steps are short
    first_pause_s  the pause before the second restart in a row, which doubles with each further restart
    max_pause_s    the longest pause before a restart
    healthy_s      the uptime of the engine after which the next restart counts as the first one again
    """

    max_queue: int = 256
    tenants: int = 1
    queue_bytes: int = 64 * MIB  # a request with images may have 12 MiB
    unread_bytes: int = MIB
    stuck_s: float = 10.0
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    healthy_s: float = 60.0

    def check_room(self, sent: Sequence[Waiting], tenant: str, n_bytes: int, retry_after: float) -> None:
        """Raise Overloaded if a tenant may not send another message of this size.

        Cancelled messages do not count as waiting, so that a client can cancel a request and repeat it immediately.
        They have a limit of their own. Without this limit, clients that disconnect immediately could fill the memory of
        the process.
        """
        waiting = [message for message in sent if not message.is_cancelled]
        own = [message.n_bytes for message in waiting if message.tenant == tenant]
        leaving = [message.n_bytes for message in sent if message.is_cancelled and message.tenant == tenant]
        if len(leaving) >= max(_LEAST_LEAVING, self.share_of(self.max_queue)) or sum(leaving) > self.queue_bytes:
            reason = f"{len(leaving)} cancelled requests have not ended"
        elif len(waiting) >= self.max_queue:
            reason = f"{len(waiting)} requests are waiting"
        elif len(own) >= self.share_of(self.max_queue):
            reason = f"{len(own)} requests with this API key are waiting, the limit for one key"
        elif own and sum(own) + n_bytes > self.share_of(self.queue_bytes):
            most = self.share_of(self.queue_bytes)
            whose = " with this API key" if self.tenants > 1 else ""
            reason = f"the waiting requests{whose} have {sum(own):,} bytes, the limit is {most:,}"
        else:
            return
        raise Overloaded(f"the queue is full: {reason}", retry_after=retry_after)

    def share_of(self, limit: int) -> int:
        """Return the share of a limit that one tenant may use."""
        return limit if self.tenants == 1 else -(-limit // 2)


_LONGEST_STEPS: Final = 20  # a multiple of the longest recent step
_BEFORE_FIRST_STEP: Final = 6  # a multiple of `stuck_s`; the first step may have to read the weights from a slow disk


class RestartPauses:
    """The backoff between restarts: no delay before the first restart, then increasing delays."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._next = 0.0

    def after(self, lived_s: float) -> float:
        """Return the pause in seconds before the restart of a process that was ready for `lived_s` seconds."""
        limits = self._limits
        pause = 0.0 if lived_s >= limits.healthy_s else self._next
        self._next = min(max(2 * pause, limits.first_pause_s), limits.max_pause_s)
        return pause


class StepProgress:
    """The time of an engine's last progress, in seconds of one monotonic clock.

    An idle engine makes progress whenever it sends a beat.
    """

    def __init__(self, limits: ServingLimits, now: float) -> None:
        self._stuck_s = limits.stuck_s
        self._last = now
        self._steps = 0
        self._longest_step_s = 0.0
        self._patience = 1.0

    def stepped(self, now: float) -> None:
        """Record that a step has ended, or that the time until now should not count as a stall."""
        self._last = now

    def beat(self, beat: Beat, now: float) -> None:
        """Record a beat."""
        if not beat.busy or beat.steps != self._steps:
            self._last = now
        self._steps = beat.steps
        self._longest_step_s = beat.longest_step_s
        self._patience = beat.patience

    def age(self, now: float) -> float:
        """Return the seconds since the last progress."""
        return now - self._last

    def is_stuck(self, now: float) -> bool:
        """Return whether the engine has made no progress for so long that it is considered stuck."""
        limit = max(self._stuck_s, _LONGEST_STEPS * self._longest_step_s)
        if not self._steps:
            limit = max(limit, _BEFORE_FIRST_STEP * self._stuck_s)
        return self.age(now) > self._patience * limit


async def _received(child: AsyncChild) -> FromChild | None:
    """Return a process's next message, or None if the process has ended. Raises BadMessage or FrameTooLong."""
    data = await child.receive(LONGEST)
    return None if data is None else FROM_CHILD.decode(data)


_SILENCE_S: Final = 60.0  # the longest time without a beat while the model is being opened
_WATCH_S: Final = 0.5
_HELD_UP_S: Final = 1.0  # seconds; if a check is this late, the server itself was held up
_EXIT_S: Final = 5.0
_LAST_NOTE_S: Final = 1.0  # how long a process that has stopped saving may take to say so
_LEAST_SOON_S: Final = 5.0


class Handlers(Protocol):
    """The callbacks of a supervisor."""

    def take(self, message: FromChild) -> None:
        """Handle a message from the process that runs the open model."""

    def process_ready(self) -> None:
        """Handle the successful reopening of the model."""

    def process_ended(self, reason: str) -> None:
        """Handle the end of the process, which the supervisor will restart."""

    def supervision_ended(self, error: BaseException) -> None:
        """Handle a bug that has ended the supervision."""


class Supervisor:
    """Runs one model in a process, and restarts the process whenever it ends.

    facts     the facts about the open model, or None until the model has been opened
    restarts  the number of restarts of the process
    """

    def __init__(
        self,
        model: Open,
        limits: ServingLimits,
        handlers: Handlers,
        *,
        command: Sequence[str] | None,
        loading: Callable[[str, float], None],
        note: Callable[[str], None],
        detail: Callable[[str], None],
    ) -> None:
        self._model = model
        self._limits = limits
        self._handlers = handlers
        self._command = command
        self._loading = loading
        self._note = note
        self._detail = detail
        self._child: AsyncChild | None = None
        self._task: asyncio.Task[None] | None = None
        self._pauses = RestartPauses(limits)
        self._progress = StepProgress(limits, time.monotonic())
        self._load_s = 0.0
        self._ready_at = 0.0  # the predicted time at which the model is open, in seconds of `time.monotonic`
        self._stuck = False
        self.state = State.LOADING
        self.facts: ModelFacts | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process ID, or None before the first start."""
        return None if self._child is None else self._child.pid

    @property
    def beat_age_s(self) -> float:
        """The seconds since the last beat that showed progress."""
        return self._progress.age(time.monotonic())

    @property
    def expected_s(self) -> float:
        """The predicted seconds until the model is open again."""
        return max(0.0, self._ready_at - time.monotonic())

    @property
    def ready_soon(self) -> bool:
        """True if a restart will probably take only a little longer than opening the model."""
        soon = self._load_s + _LEAST_SOON_S
        return self.state is State.RESTARTING and -soon < self._ready_at - time.monotonic() < self._load_s + soon

    async def start(self) -> None:
        """Open the model. Raises an error if the model cannot be opened."""
        began = time.monotonic()
        try:
            child = await self._open()
        except BaseException:
            self.state = State.FAILED
            raise
        self._load_s = time.monotonic() - began
        self.state = State.READY
        self._task = asyncio.create_task(self._supervise(child))

    def send(self, message: bytes) -> None:
        """Send an encoded message to the process."""
        if self._child is not None:
            self._child.send(message)

    async def close(self) -> None:
        """End the process. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        if self._child is not None:
            self._child.send(TO_CHILD.encode(Close()))
            if self._model.saved_prefixes and self.state is State.READY:
                await self._tell_last_notes(self._child)
            await self._child.end(_EXIT_S if self.state is State.READY else 0.0)
        self.state = State.FAILED

    async def _tell_last_notes(self, child: AsyncChild) -> None:
        """Show the notes of a process that saves prefixes before it ends, until the process closes its output."""
        with suppress(TimeoutError, BadMessage, FrameTooLong):
            async with asyncio.timeout(SAVE_S + _LAST_NOTE_S):
                while (message := await _received(child)) is not None:
                    if isinstance(message, Note):
                        self._tell(message)

    async def _open(self) -> AsyncChild:
        """Start a process and open the model. Raises LlmrunError."""
        child = self._child = await AsyncChild.start(
            self._command or commands.command("engine.child.main"), purpose="the engine's process"
        )
        try:
            child.send(TO_CHILD.encode(self._model))
            self.facts = await self._opened_by(child)
        except BaseException:
            await child.end()
            raise
        return child

    async def _opened_by(self, child: AsyncChild) -> ModelFacts:
        while True:
            try:
                message = await asyncio.wait_for(_received(child), _SILENCE_S)
            except TimeoutError:
                raise LlmrunError(f"the engine's process gave no sign of life for {_SILENCE_S:.0f} s") from None
            except (BadMessage, FrameTooLong) as error:
                raise LlmrunError(f"the engine's process sent an invalid message: {error}") from error
            match message:
                case Opened(facts=facts):
                    return facts
                case CannotOpen(error=refused) | Crashed(error=refused):
                    raise refused
                case Loading(work=work, fraction=fraction):
                    self._loading(work, fraction)
                case Note():
                    self._tell(message)
                case None:
                    raise LlmrunError(f"the engine's process ended while it opened the model: {await child.end(1.0)}")

    async def _supervise(self, child: AsyncChild) -> None:
        try:
            while True:
                ready_since = time.monotonic()
                reason = await self._run(child)
                self.state = State.RESTARTING
                pause = self._pauses.after(time.monotonic() - ready_since)
                self._expect(pause)
                self._note(f"the engine's process ended ({reason}); restarting it")
                self._handlers.process_ended(reason)
                child = await self._reopen(pause)
                self.restarts += 1
                self.state = State.READY
                self._handlers.process_ready()
        except Exception as error:
            self.state = State.FAILED
            self._handlers.supervision_ended(error)
            raise

    async def _reopen(self, pause: float) -> AsyncChild:
        """Open the model again, retrying until the model is open."""
        while True:
            await asyncio.sleep(pause)
            try:
                return await self._open()
            except LlmrunError as error:
                self._note(f"cannot reopen the model, trying again: {error}")
            pause = self._pauses.after(0.0)
            self._expect(pause)

    def _expect(self, pause: float) -> None:
        self._ready_at = time.monotonic() + pause + self._load_s

    async def _run(self, child: AsyncChild) -> str:
        """Handle a process's messages until the process ends, and return a short description of its ending."""
        self._progress = StepProgress(self._limits, time.monotonic())
        self._stuck = False
        reason = ""
        watch = asyncio.create_task(self._watch(child))
        try:
            while (message := await _received(child)) is not None:
                self._note_progress(message)
                if isinstance(message, Crashed):
                    reason = str(message.error)
                    break
                if isinstance(message, Note):
                    self._tell(message)
                self._handlers.take(message)
        except (BadMessage, FrameTooLong) as error:
            reason = f"the process sent an invalid message: {error}"
        finally:
            watch.cancel()
        ending = await child.end(0.0 if reason else 1.0)
        return reason or ("the engine was stuck" if self._stuck else ending)

    def _tell(self, note: Note) -> None:
        (self._detail if note.is_detail else self._note)(note.text)

    def _note_progress(self, message: FromChild) -> None:
        now = time.monotonic()
        beat = message.beat if isinstance(message, Stepped) else message
        if isinstance(message, Stepped):
            self._progress.stepped(now)
        if isinstance(beat, Beat):
            self._progress.beat(beat, now)

    async def _watch(self, child: AsyncChild) -> None:
        """Kill the process when its engine is stuck."""
        while True:
            due = time.monotonic() + _WATCH_S
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - due > _HELD_UP_S:
                self._progress.stepped(now)  # the server's own process was held up, and messages may be waiting
            elif self._progress.is_stuck(now):
                self._stuck = True
                child.kill()
