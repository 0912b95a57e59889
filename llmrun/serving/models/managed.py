"""One model that a server can load and unload."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from llmrun.base.errors import DoesNotFit, LlmrunError
from llmrun.serving.models.known import KnownModel
from llmrun.serving.processes.served_model import ServedModel


class OwnedModel(ServedModel, Protocol):
    """A model that the server opens and closes."""

    async def start(self) -> None:
        """Open the model. Raises its error if it cannot be opened."""

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests, let the others finish, and end those that still run after `seconds`."""

    async def close(self) -> None:
        """End all requests with an error, and free all resources. Idempotent."""


@dataclass(slots=True, eq=False)
class ManagedModel:
    """A model, whether it is loaded or not.

    process   the process that runs it, or None if it is not loaded
    memory    bytes that it may take at most while it is loaded; as long as it has never been loaded, its file's size
    users     requests that use it
    waiting   requests that wait until it is loaded
    leaving   whether it makes room for another model: new requests wait until it is loaded again
    used      when a request last ended, in seconds of the loop's clock
    keep_s    seconds without requests after which it is unloaded
    held      what is freed when it is unloaded, such as the lock that keeps its file from being removed
    too_large the error of a model that did not fit although it was the only one, which counts until `too_large_until`
    idle      an event that is set while no request uses it
    """

    known: KnownModel
    keep_s: float
    process: OwnedModel | None = None
    memory: int = 0
    users: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    leaving: bool = False
    too_large: DoesNotFit | None = None
    too_large_until: float = -math.inf
    used: float = -math.inf
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.memory = self.known.size
        self.idle.set()

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits for it."""
        return any(not future.done() for future in self.waiting)

    def acquire(self) -> None:
        """Count one more request that uses it."""
        self.users += 1
        self.idle.clear()
        self.stop_timer()

    def stop_timer(self) -> None:
        """Stay loaded for now: cancel the timer that would unload the model."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def release(self, now: float) -> None:
        """Count one request less. `now` is the time of the loop's clock."""
        self.users -= 1
        self.used = now
        if not self.users:
            self.idle.set()

    def admit(self) -> None:
        """Let all waiting requests use it."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                self.acquire()
                future.set_result(None)

    def refuse(self, error: LlmrunError) -> None:
        """End all waiting requests with an error."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)
