"""Keeps a process with an open model running: starts it, watches its steps, and restarts it when it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from llmrun.base.errors import LlmrunError
from llmrun.engine.child.codec import BadMessage
from llmrun.engine.child.messages import (
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
    encode_to_child,
)
from llmrun.engine.facts import ModelFacts
from llmrun.serving.processes.child import ChildProcess
from llmrun.serving.processes.limits import ServingLimits
from llmrun.serving.processes.restarts import RestartPauses, StepProgress
from llmrun.serving.processes.served_model import State

_SILENCE_S: Final = 60.0  # the longest time without a beat while the model is being opened
_WATCH_S: Final = 0.5
_HELD_UP_S: Final = 1.0  # a check that is this late says nothing about the engine
_EXIT_S: Final = 5.0
_LEAST_SOON_S: Final = 5.0


class Handlers(Protocol):
    """The callbacks of a supervisor."""

    def take(self, message: FromChild) -> None:
        """Handle a message of the open model."""

    def process_ready(self) -> None:
        """The model is open again."""

    def process_ended(self, reason: str) -> None:
        """The process has ended, and will be restarted."""

    def supervision_ended(self, error: BaseException) -> None:
        """A bug has ended the supervision."""


class Supervisor:
    """One model whose process is restarted whenever it ends.

    facts     the facts about the open model, or None before the first time
    restarts  how often the process was restarted
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
        self._child: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._pauses = RestartPauses(limits)
        self._progress = StepProgress(limits, time.monotonic())
        self._load_s = 0.0
        self._ready_at = 0.0  # when the model will probably be open, in seconds of `time.monotonic`
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
        """Seconds since the last beat that showed progress."""
        return self._progress.age(time.monotonic())

    @property
    def expected_s(self) -> float:
        """The predicted seconds until the model is open again."""
        return max(0.0, self._ready_at - time.monotonic())

    @property
    def ready_soon(self) -> bool:
        """Whether a restart will probably be over in little more than the time that opening the model takes."""
        soon = self._load_s + _LEAST_SOON_S
        return self.state is State.RESTARTING and -soon < self._ready_at - time.monotonic() < self._load_s + soon

    async def start(self) -> None:
        """Open the model. Raises its error if it cannot be opened."""
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
            self._child.send(encode_to_child(Close()))
            await self._child.end(_EXIT_S if self.state is State.READY else 0.0)
        self.state = State.FAILED

    async def _open(self) -> ChildProcess:
        """Start a process and open the model. Raises LlmrunError."""
        child = self._child = await ChildProcess.start(self._command)
        try:
            child.send(encode_to_child(self._model))
            self.facts = await self._opened_by(child)
        except BaseException:
            await child.end()
            raise
        return child

    async def _opened_by(self, child: ChildProcess) -> ModelFacts:
        while True:
            try:
                message = await asyncio.wait_for(child.receive(), _SILENCE_S)
            except TimeoutError:
                raise LlmrunError(f"the engine's process gave no sign of life for {_SILENCE_S:.0f} s") from None
            except (BadMessage, ValueError) as error:
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

    async def _supervise(self, child: ChildProcess) -> None:
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

    async def _reopen(self, pause: float) -> ChildProcess:
        """Open the model again, as often as necessary."""
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

    async def _run(self, child: ChildProcess) -> str:
        """Handle a process's messages until it ends, and return how it ended, in a few words."""
        self._progress = StepProgress(self._limits, time.monotonic())
        self._stuck = False
        reason = ""
        watch = asyncio.create_task(self._watch(child))
        try:
            while (message := await child.receive()) is not None:
                self._note_progress(message)
                if isinstance(message, Crashed):
                    reason = str(message.error)
                    break
                if isinstance(message, Note):
                    self._tell(message)
                self._handlers.take(message)
        except (BadMessage, ValueError) as error:
            reason = f"it sent an invalid message: {error}"
        finally:
            watch.cancel()
        ending = await child.end(0.0 if reason else 1.0)
        return reason or ("it was stuck" if self._stuck else ending)

    def _tell(self, note: Note) -> None:
        (self._detail if note.is_detail else self._note)(note.text)

    def _note_progress(self, message: FromChild) -> None:
        now = time.monotonic()
        beat = message.beat if isinstance(message, Stepped) else message
        if isinstance(message, Stepped):
            self._progress.stepped(now)
        if isinstance(beat, Beat):
            self._progress.beat(beat, now)

    async def _watch(self, child: ChildProcess) -> None:
        """Kill the process when its engine is stuck."""
        while True:
            due = time.monotonic() + _WATCH_S
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - due > _HELD_UP_S:
                self._progress.stepped(now)  # this process was held up, and messages may be waiting
            elif self._progress.is_stuck(now):
                self._stuck = True
                child.kill()
