"""BackgroundEngine, which has the interface of Engine for a model that another process keeps open.

If the engine's process ends while it answers, the client opens the model itself, repeats its unfinished requests, and
leaves out what it has already returned. If the process has left in the meantime, because it was idle for too long, the
client joins or starts another one, but only once per request, because the request itself may be what ends the engines.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from llmrun.base.errors import Cancelled, LlmrunError, UsageError
from llmrun.base.processes.frames import BadMessage, FrameTooLong
from llmrun.base.types import FinishReason
from llmrun.engine.child.messages import (
    FROM_CHILD,
    TO_CHILD,
    Ask,
    Cancel,
    ChatDescribed,
    CountPrompt,
    DescribeChat,
    Note,
    PrefixSaved,
    PromptCounted,
    Rejected,
    SavePrefix,
    Stepped,
    Taken,
    cancelled_unbegun,
)
from llmrun.engine.requests import Failed, Finished, PrefillProgress, PromptDelta, TextDelta
from llmrun.serving.processes.deltas import DeliveredDeltas, ReplayDiffers

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.base import Answering, ShownTemplate, ThinkingSupport, ToolSupport
    from llmrun.engine.child.messages import FromChild, ToChild
    from llmrun.engine.requests import Event, Request, StatePlace
    from llmrun.serving.background.handshake import BackgroundFacts
    from llmrun.serving.background.joining import Joined

_DIFFERS = "the background engine ended, and the repeated answer differs from the part already shown"

Reply = TypeVar("Reply")


class _Ended(Exception):
    """The engine's process has ended."""


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A request without its last event.

    number          the id in events; the engine's id differs
    is_taken        True if an engine has accepted the request
    is_cancelled    True if the caller has cancelled the request
    is_cancellable  True while the engine has the request but no cancellation of it
    n_asked         the number of engines that have been asked
    deltas          the pieces of the answer that the caller has received
    """

    number: int
    request: Request
    is_taken: bool = False
    is_cancelled: bool = False
    is_cancellable: bool = False
    n_asked: int = 0
    deltas: DeliveredDeltas = field(default_factory=DeliveredDeltas)


class BackgroundEngine:
    """A model that a background engine keeps open.

    Signal handlers may call `cancel` and `cancel_current`, and other threads may call `prefill_progress`.

    load_s  seconds to open the model if this client has started the engine, otherwise 0
    pid     the engine's process
    """

    def __init__(
        self,
        joined: Joined,
        *,
        was_started: bool,
        rejoin: Callable[[], tuple[Joined, bool] | None],
        open_here: Callable[[], Answering],
        note: Callable[[str], None],
    ) -> None:
        """Take over a connection.

        rejoin     joins or starts an engine after this one has left, and returns whether it was started; None if this
                   process must open the model
        open_here  opens the model in this process after the engine has ended unexpectedly
        note       called with a sentence for the user in that case
        """
        self._rejoin, self._open_here, self._note = rejoin, open_here, note
        self._numbers = itertools.count()
        self._unfinished: dict[int, _Unfinished] = {}  # keyed by the engine's id, negative without an engine
        self._arrived: deque[FromChild] = deque()  # messages that arrived while another message was expected
        self._other: Answering | None = None  # the engine in this process that has replaced the background engine
        self._progress: list[PrefillProgress] = []
        self._last_events: list[Finished | Failed] = []  # the last events of requests that no engine answers
        self._is_sending = False  # True if a signal handler must not send anything
        self._place: StatePlace | None = None
        self._report: Callable[[str], None] = note
        self._take_over(joined, was_started=was_started)

    def _take_over(self, joined: Joined, *, was_started: bool) -> None:
        self._link, self._facts = joined.link, joined.facts
        self._client = joined.first_id
        self._engine_ids = itertools.count(joined.first_id)
        self.load_s = self._facts.load_s if was_started else 0.0
        self.pid = joined.pid

    @property
    def info(self) -> ModelInfo:
        """See Engine."""
        return self._facts.info if self._other is None else self._other.info

    @property
    def facts(self) -> BackgroundFacts:
        """The facts about the model that the engine sent when this client joined."""
        return self._facts

    @property
    def cache_tokens(self) -> int:
        """See Engine."""
        return self._facts.cache_tokens

    @property
    def speculates(self) -> bool:
        """See Engine."""
        return self._facts.speculates

    @property
    def has_draft_head(self) -> bool:
        """See Engine."""
        return self._facts.has_draft_head

    @property
    def template(self) -> ShownTemplate | None:
        """See Engine."""
        return self._facts.template

    @property
    def sees_images(self) -> bool:
        """See Engine."""
        return self._facts.sees_images if self._other is None else self._other.sees_images

    @property
    def takes_chats(self) -> bool:
        """See Engine."""
        return self._facts.takes_chats

    @property
    def saves_blocks(self) -> bool:
        """See Engine. Only the CPU engine runs in the background."""
        return self._other is None or self._other.saves_blocks

    @property
    def idle(self) -> bool:
        """See Engine."""
        return not self._unfinished and not self._last_events

    @property
    def thinking(self) -> ThinkingSupport | None:
        """See Engine."""
        return self._described[0]

    @property
    def tools(self) -> ToolSupport | None:
        """See Engine."""
        return self._described[1]

    @cached_property
    def _described(self) -> tuple[ThinkingSupport | None, ToolSupport | None]:
        if (found := self._called(DescribeChat, ChatDescribed)) is not None:
            return found.thinking, found.tools
        assert self._other is not None
        return self._other.thinking, self._other.tools

    def prompt_tokens(self, request: Request) -> int | None:
        """See Engine."""
        if (found := self._called(lambda call: CountPrompt(call, request), PromptCounted)) is not None:
            return found.tokens
        assert self._other is not None
        return self._other.prompt_tokens(request)

    def submit(self, request: Request) -> int:
        """See Engine."""
        unfinished = _Unfinished(next(self._numbers), request)
        try:
            self._ask(unfinished)
        except _Ended:
            self._replace()
        return unfinished.number

    def step(self) -> list[Event]:
        """Wait until the engine sends events, and return them."""
        if self._last_events:
            last, self._last_events = self._last_events, []
            return [*last]
        if self._other is not None:
            return self._passed_on(self._other.step())
        try:
            message = self._next()
        except _Ended:
            self._replace()
            return []
        match message:
            case Stepped(events=events):
                return self._passed_on(events)
            case Rejected(id=engine_id, error=error) if engine_id in self._unfinished:
                self._end(engine_id, error)
        return []

    def generate(self, request: Request) -> Iterator[Event]:
        """See Engine."""
        if not self.idle:
            raise UsageError("cannot generate while other requests are unfinished: use submit and step instead")
        try:
            self.submit(request)
            while not self.idle:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            if not self.idle:
                self.cancel_current()
                self._unfinished.clear()
                self._last_events.clear()

    def prefill_progress(self) -> list[PrefillProgress]:
        """See Engine."""
        return self._progress if self._other is None else self._other.prefill_progress()

    def cancel(self, request_id: int) -> None:
        """See Engine."""
        for unfinished in [*self._unfinished.values()]:
            unfinished.is_cancelled |= unfinished.number == request_id
        self._send_cancels()

    def cancel_current(self) -> None:
        """See Engine."""
        for unfinished in [*self._unfinished.values()]:
            unfinished.is_cancelled = True
        if self._other is not None:
            self._other.cancel_current()
        self._send_cancels()

    def use_state(self, place: StatePlace | None, report: Callable[[str], None]) -> None:
        """See Engine."""
        self._place, self._report = place, report
        if self._other is not None:
            self._other.use_state(place, report)

    def save_state(self, most: int | None = None) -> None:
        """See Engine. If the engine has ended, nothing is saved."""
        if self._other is not None:
            self._other.save_state(most)
        elif self._place is not None:
            call = next(self._engine_ids)
            with suppress(_Ended):
                self._send(SavePrefix(call, structs.replace(self._place, client=self._client), most))
                self._answer_to(call, PrefixSaved)

    def close(self) -> None:
        """Close the connection, which cancels all unfinished requests. Idempotent."""
        self._unfinished.clear()
        self._link.close()
        if self._other is not None:
            self._other.close()

    def __enter__(self) -> BackgroundEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_cancels(self) -> None:
        """Tell the engine which requests are cancelled. Signal handlers may call this method at any time."""
        while not self._is_sending:  # otherwise, a handler has interrupted `_send`, which calls this method at its end
            cancelled = {
                engine_id: each
                for engine_id, each in [*self._unfinished.items()]
                if each.is_cancelled and each.is_cancellable and engine_id >= 0
            }
            if not cancelled:
                return
            for each in cancelled.values():
                each.is_cancellable = False
            if self._other is None:
                with suppress(_Ended):  # the next step notices the end
                    self._send_message(Cancel(tuple(cancelled)))
            else:
                for engine_id in cancelled:
                    self._other.cancel(engine_id)

    def _send(self, message: ToChild) -> None:
        """Send a message, and then the cancellations that a signal handler could not send meanwhile. Raises _Ended."""
        self._send_message(message)
        self._send_cancels()

    def _send_message(self, message: ToChild) -> None:
        self._is_sending = True
        try:
            self._link.send(TO_CHILD.encode(message))
        except OSError:
            raise _Ended from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"request cannot be represented in JSON: {' '.join(str(error).split())[:200]}") from error
        finally:
            self._is_sending = False

    def _ask(self, unfinished: _Unfinished) -> None:
        """Submit a request to the engine. Raises _Ended, and the error of a request that is not accepted."""
        if self._other is not None:
            self._unfinished[self._other.submit(unfinished.request)] = unfinished
            unfinished.is_cancellable = True
            return
        engine_id = next(self._engine_ids)
        unfinished.is_cancellable = False  # engines ignore cancellations of requests that they do not have yet
        self._unfinished[engine_id] = unfinished
        unfinished.n_asked += 1
        try:
            place = self._place and structs.replace(self._place, client=self._client)
            self._send_message(Ask(engine_id, unfinished.request, time.perf_counter(), place=place))
            unfinished.is_cancellable = True
            self._send_cancels()  # those of signals that arrived before now
            self._answer_to(engine_id, Taken)
        except Cancelled as error:
            self._end(engine_id, error)
        except LlmrunError:
            del self._unfinished[engine_id]
            raise
        else:
            unfinished.is_taken = True

    def _end(self, engine_id: int, error: LlmrunError) -> None:
        """End a request with an error, or without an answer if it was cancelled."""
        number = self._unfinished.pop(engine_id).number
        is_cancelled = isinstance(error, Cancelled)
        self._last_events.append(cancelled_unbegun(number) if is_cancelled else Failed(number, error))

    def _next(self) -> FromChild:
        """Return the next message. Raises _Ended."""
        return self._arrived.popleft() if self._arrived else self._received()

    def _received(self) -> FromChild:
        try:
            while (data := self._link.receive()) is not None:
                message = FROM_CHILD.decode(data)
                if not isinstance(message, Note):
                    return message
                self._report(message.text)
        except (BadMessage, FrameTooLong) as error:
            raise _Ended from error
        raise _Ended

    def _answer_to(self, call: int, kind: type[Reply]) -> Reply:
        """Wait for the answer to a message, and keep all others. Raises _Ended and the error of a rejection."""
        while True:
            message = self._received()
            if getattr(message, "id", None) != call:
                self._arrived.append(message)
            elif isinstance(message, Rejected):
                raise message.error
            elif isinstance(message, kind):
                return message

    def _called(self, message: Callable[[int], ToChild], kind: type[Reply]) -> Reply | None:
        """Return the answer to a call, or None if an engine in this process has replaced the background engine."""
        for is_last in (False, True):
            if self._other is not None:
                return None
            try:
                call = next(self._engine_ids)
                self._send(message(call))
                return self._answer_to(call, kind)
            except _Ended:
                self._replace(here=is_last)
        return None

    def _replace(self, *, here: bool = False) -> None:
        """Continue with another engine, and repeat the unfinished requests. `here` opens it in this process."""
        while True:
            self._link.close()
            self._arrived.clear()
            self._progress = []
            # Requests of the engine that has ended must not have the same ids as those of the next engine.
            self._unfinished = {-1 - place: each for place, each in enumerate(dict.fromkeys(self._unfinished.values()))}
            was_idle = not self._unfinished
            self._end_cancelled()
            if not (was_idle or self._unfinished):
                return  # the next request replaces the engine
            self._join_or_open(here)
            with suppress(_Ended):
                self._repeat()
                return

    def _join_or_open(self, here: bool) -> None:
        unfinished = self._unfinished.values()
        if any(each.is_taken for each in unfinished):
            self._note("the background engine ended unexpectedly, so this process continues the answer itself")
            here = True
        here = here or any(each.n_asked > 1 for each in unfinished)
        if not here and (found := self._rejoin()) is not None:
            joined, was_started = found
            self._take_over(joined, was_started=was_started)
        else:
            self._other = self._open_here()
            self.load_s = self._other.load_s
            self._other.use_state(self._place, self._report)

    def _repeat(self) -> None:
        """Ask the new engine for all unfinished requests. Raises _Ended, and the error of a request without events."""
        self._end_cancelled()
        for key, request in [*self._unfinished.items()]:
            request.deltas.start_again()
            try:
                self._ask(request)
            except LlmrunError as error:
                if not request.is_taken:
                    del self._unfinished[key]
                    raise
                self._last_events.append(Failed(request.number, error))
            del self._unfinished[key]
        self._send_cancels()  # the cancellations of requests that no engine had when the signal arrived

    def _end_cancelled(self) -> None:
        for key, request in [*self._unfinished.items()]:
            if request.is_cancelled:
                self._end(key, Cancelled("the request was cancelled"))

    def _passed_on(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that the caller does not have yet, with the caller's ids."""
        passed: list[Event] = []
        for event in events:
            if (request := self._unfinished.get(event.request_id)) is None:
                continue
            renamed = structs.replace(event, request_id=request.number)
            try:
                passed += self._news(request, renamed)
            except ReplayDiffers:
                self.cancel(request.number)
                renamed = Failed(request.number, LlmrunError(_DIFFERS))
                passed.append(renamed)
            if isinstance(renamed, Finished | Failed):
                del self._unfinished[event.request_id]
        return passed

    def _news(self, request: _Unfinished, event: Event) -> list[Event]:
        """Return the event if the caller does not have it yet. Raises ReplayDiffers."""
        match event:
            case PrefillProgress():
                self._progress = [] if request.deltas.count else [event]
                return [*self._progress]
            case PromptDelta() | TextDelta():
                self._progress = []
                return [event] if request.deltas.new_bytes(event) else []
            case Finished(reason=reason, timings=timings):
                if request.deltas.behind and reason is not FinishReason.CANCELLED:
                    raise ReplayDiffers
                return [structs.replace(event, timings=replace(timings, load_s=self.load_s))]
        return [event]
