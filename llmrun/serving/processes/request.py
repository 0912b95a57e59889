"""One request in the server: collects its events for the client, and replays the request if the process ends.

A replay runs the request again and skips the events that the client already has. `sort_out` decides which requests are
replayed when a process has ended, and which requests fail with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from llmrun.base.errors import BackendCrashed, Cancelled, LlmrunError, Unavailable
from llmrun.engine.child.messages import cancelled_unbegun
from llmrun.engine.requests import Event, Failed, Finished, PrefillProgress, PromptDelta, TextDelta
from llmrun.serving.processes.deltas import DeliveredDeltas, ReplayDiffers

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Taken
    from llmrun.engine.requests import Request


class Phase(Enum):
    """The phase of a request, as known to the server."""

    HELD = auto()  # waiting in the server until the engine's process is ready
    SENT = auto()  # sent to the process, but not yet prepared
    QUEUED = auto()  # prepared, and waiting in the engine's queue
    BEGUN = auto()  # included in at least one step of the current process


class Arrival(NamedTuple):
    """An event, and the time of its arrival in seconds of `time.perf_counter`."""

    at: float
    event: Event


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request, from its receipt to its last event.

    The route that answers the client calls `accepted`, `take` and `cancel`, and the model calls the other methods.

    received     when the server received the request, in seconds of `time.perf_counter`
    n_bytes      the size of the request's message to the process
    unread_bytes the maximum size of unread events once the client has begun to read
    news         an event that is set when the request is accepted, receives events or fails
    on_over      called when the request is over
    on_cancel    called when the client cancels the request
    taken        the engine's acceptance, or None before the acceptance
    has_begun    True if the request was in a step of any process
    begun_at     when the request was first in a step, in seconds of `time.perf_counter`
    progress     the progress of the prompt until the answer begins, or None
    told_at      when the log last reported this progress
    deaths       the number of processes that ended after the request had begun
    unprepared   the number of processes that ended while preparing the request
    """

    id: int
    request: Request
    received: float
    n_bytes: int
    unread_bytes: int
    news: asyncio.Event
    on_over: Callable[[], None]
    on_cancel: Callable[[ServedRequest], None]
    phase: Phase = Phase.HELD
    has_begun: bool = False
    begun_at: float = 0.0
    progress: PrefillProgress | None = None
    told_at: float = 0.0
    cancelled: bool = False
    over: bool = False
    deaths: int = 0
    unprepared: int = 0
    deltas: DeliveredDeltas = field(default_factory=DeliveredDeltas)
    taken: Taken | None = None
    _arrived: list[Arrival] = field(default_factory=list)
    _is_read: bool = False
    _unread: int = 0  # bytes
    _error: LlmrunError | None = None

    @property
    def waits(self) -> bool:
        """True if the request has not ended and has not been part of a step."""
        return not self.over and not self.has_begun

    def accept(self, taken: Taken) -> None:
        """Record that the engine has accepted the request."""
        self.taken = self.taken or taken
        self.news.set()

    async def accepted(self) -> Taken:
        """Wait until the engine has accepted the request. An accepted request may still wait in the queue.

        Raises the request's error if the request is invalid, Overloaded or Unavailable if the server is busy, and
        Cancelled if the client has cancelled the request.
        """
        while self.taken is None:
            if self.over:
                raise self._error or Cancelled("the request was cancelled")
            self.news.clear()
            await self.news.wait()
        return self.taken

    def put(self, event: Event) -> None:
        """Pass an event on to the client, unless the client already has the event or the request is over."""
        if self.over:
            return
        size = 0
        match event:
            case Failed(error=error):
                self.fail(error)
                return
            case PrefillProgress():
                before = self.progress
                if self.deltas.count:
                    return
                if before is not None and event.done <= before.done:
                    if event.image == before.image:
                        return
                    event = structs.replace(event, done=before.done)
                self.progress = event
            case PromptDelta() | TextDelta():
                self.progress = None
                try:
                    size = self.deltas.new_bytes(event)
                except ReplayDiffers:
                    self._fail_differing()
                    return
                if not size:
                    return
            case Finished():
                if self.deltas.behind and not self.cancelled:
                    self._fail_differing()
                    return
        self._arrived.append(Arrival(time.perf_counter(), event))
        self._unread += size
        if isinstance(event, Finished):
            self._end()
        elif self._unread > self.unread_bytes and self._is_read:
            self._arrived.clear()
            self.fail(LlmrunError(f"the client reads too slowly: {self._unread:,} bytes of its answer are waiting"))
        self.news.set()

    def fail(self, error: LlmrunError) -> None:
        """End the request with an error, which the client receives after all earlier events."""
        if not self.over:
            self._error = error
            self._end()

    def take(self) -> list[Arrival]:
        """Return the events that have arrived since the last call, in order. The final event is Finished.

        After the last events of a failed request, the request's error is raised, and Failed is never returned.
        """
        arrived, self._arrived, self._unread, self._is_read = self._arrived, [], 0, True
        if self._error is not None and not arrived:
            raise self._error
        return arrived

    def cancel(self) -> None:
        """Stop the request after the current step at the latest. This method is idempotent."""
        self.on_cancel(self)

    def _fail_differing(self) -> None:
        self.fail(LlmrunError("the engine was restarted, and its answer differs from the part that was sent before"))

    def _end(self) -> None:
        self.over = True
        self.news.set()
        self.on_over()


MOST_DEATHS: Final = 2
_MOST_UNPREPARED: Final = 3  # more than MOST_DEATHS, because a killed process is always preparing some request


def sort_out(
    requests: Sequence[ServedRequest],
    alone: ServedRequest | None,
    preparing: ServedRequest | None,
    *,
    batch_invariant: bool,
    reason: str,
) -> None:
    """End the requests that cannot be replayed, and return all other requests to the server's own queue.

    alone      the request whose first step was running alone when the process ended, or None
    preparing  the last request that the process has begun to prepare, or None
    reason     the cause of the process's end, for error messages

    Requests that had not begun are replayed any number of times. Requests that had begun are replayed once. If `alone`
    is given, the process's end counts only against that request. Without batch invariance, a repeated answer could
    differ from the text that the client already has.
    """
    for request in requests:
        if request.cancelled:
            request.put(cancelled_unbegun(request.id))
        elif request.phase is Phase.BEGUN and (alone is None or request is alone):
            request.deaths += 1
        elif request is preparing and request.phase is Phase.SENT:
            request.unprepared += 1
        if request.deaths >= MOST_DEATHS or request.unprepared >= _MOST_UNPREPARED:
            request.fail(ended_repeatedly(reason))
        elif request.phase is Phase.BEGUN and request.deltas.count and not batch_invariant:
            request.fail(Unavailable(f"the engine ended while it ran this request: {reason}", state="restarting"))
        request.phase = Phase.HELD
        request.deltas.start_again()


def ended_repeatedly(reason: str) -> BackendCrashed:
    """Return the error for a request that is not replayed again."""
    return BackendCrashed(f"the engine ended repeatedly while it ran this request: {reason}")


def replay_order(requests: Sequence[ServedRequest]) -> list[ServedRequest]:
    """Return the requests in replay order: started requests come first, and older requests precede newer requests."""
    return sorted(requests, key=lambda request: (not request.has_begun, request.id))
