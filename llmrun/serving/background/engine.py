"""BackgroundEngine, which has the interface of Engine for a model that another process keeps open.

If the engine's process ends while it answers, the client opens the model itself, repeats its unfinished requests, and
leaves out what it has already returned. If the process has left in the meantime, because it was idle for too long, the
client starts another one.
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
    PromptCounted,
    Rejected,
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
    from llmrun.engine.requests import Event, Request
    from llmrun.serving.background.handshake import BackgroundFacts
    from llmrun.serving.background.joining import Joined

_DIFFERS = "the background engine ended, and the repeated answer differs from the part that was shown before"

Reply = TypeVar("Reply")


class _Ended(Exception):
    """The engine's process has ended."""


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A request without its last event.

    number   the id in events; the engine's id differs
    is_taken True if the engine has accepted the request
    deltas   the pieces of the answer that the caller has received
    """

    number: int
    request: Request
    is_taken: bool = False
    deltas: DeliveredDeltas = field(default_factory=DeliveredDeltas)


class BackgroundEngine:
    """A model that a background engine keeps open.

    Signal handlers may call `cancel` and `cancel_current`, and other threads `prefill_progress`.

    load_s  seconds to open the model if this client has started the engine, otherwise 0
    pid     the engine's process
    """

    def __init__(
        self,
        joined: Joined,
        *,
        was_started: bool,
        rejoin: Callable[[], Answering],
        open_here: Callable[[], Answering],
        note: Callable[[str], None],
    ) -> None:
        """Take over a connection.

        rejoin     joins or starts an engine after this one has left
        open_here  opens the model in this process after the engine has ended unexpectedly
        note       called with a sentence for the user in that case
        """
        self._link, self._facts = joined.link, joined.facts
        self._rejoin, self._open_here, self._note = rejoin, open_here, note
        self._engine_ids = itertools.count(joined.first_id)
        self._numbers = itertools.count()
        self._unfinished: dict[int, _Unfinished] = {}  # keyed by the engine's id
        self._arrived: deque[FromChild] = deque()  # messages that arrived while another message was expected
        self._other: Answering | None = None  # the engine that has replaced this one
        self._progress: list[PrefillProgress] = []
        self._failed: list[Failed] = []  # requests that could not be repeated
        # Signal handlers may write the next attributes at any time, so each write is atomic.
        self._cancels = 0
        self._is_sending = False
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
    def takes_chats(self) -> bool:
        """See Engine."""
        return self._facts.takes_chats

    @property
    def idle(self) -> bool:
        """See Engine."""
        return not self._unfinished

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
        unfinished, before = _Unfinished(next(self._numbers), request), self._cancels
        if self._other is None:
            engine_id = next(self._engine_ids)
            self._unfinished[engine_id] = unfinished
            try:
                self._send(Ask(engine_id, request, time.perf_counter()))
                if self._cancels != before:
                    self._send(Cancel((engine_id,)))
                self._answer_to(engine_id, Taken)
                unfinished.is_taken = True
            except LlmrunError:
                del self._unfinished[engine_id]
                raise
            except _Ended:
                self._replace()
        else:
            self._unfinished[self._other.submit(request)] = unfinished
        return unfinished.number

    def step(self) -> list[Event]:
        """Wait until the engine sends events, and return them."""
        if self._failed:
            failed, self._failed = self._failed, []
            return [*failed]
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
                number = self._unfinished.pop(engine_id).number
                return [cancelled_unbegun(number) if isinstance(error, Cancelled) else Failed(number, error)]
        return []

    def generate(self, request: Request) -> Iterator[Event]:
        """See Engine."""
        if not self.idle:
            raise UsageError("cannot generate while other requests are unfinished: use submit and step instead")
        self.submit(request)
        try:
            while not self.idle or self._failed:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            if not self.idle:
                self.cancel_current()
                self._unfinished.clear()

    def prefill_progress(self) -> list[PrefillProgress]:
        """See Engine."""
        return self._progress if self._other is None else self._other.prefill_progress()

    def cancel(self, request_id: int) -> None:
        """See Engine."""
        for engine_id, unfinished in [*self._unfinished.items()]:
            if unfinished.number == request_id:
                self._cancel((engine_id,))

    def cancel_current(self) -> None:
        """See Engine."""
        self._cancels += 1
        self._cancel(tuple(self._unfinished))

    def close(self) -> None:
        """Leave the engine, which cancels all unfinished requests. Idempotent."""
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

    def _cancel(self, ids: tuple[int, ...]) -> None:
        if self._other is not None:
            if len(ids) == len(self._unfinished):
                self._other.cancel_current()
            for engine_id in ids:
                self._other.cancel(engine_id)
        elif ids and not self._is_sending:  # otherwise, `_send` is interrupted in the middle of a message
            with suppress(OSError):
                self._link.send(TO_CHILD.encode(Cancel(ids)))

    def _send(self, message: ToChild) -> None:
        before, self._is_sending = self._cancels, True
        try:
            self._link.send(TO_CHILD.encode(message))
        except OSError:
            raise _Ended from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"request cannot be represented in JSON: {' '.join(str(error).split())[:200]}") from error
        finally:
            self._is_sending = False
        if self._cancels != before:
            self._cancel(tuple(self._unfinished))

    def _next(self) -> FromChild:
        """Return the next message. Raises _Ended."""
        return self._arrived.popleft() if self._arrived else self._received()

    def _received(self) -> FromChild:
        try:
            data = self._link.receive()
            if data is not None:
                return FROM_CHILD.decode(data)
        except (BadMessage, FrameTooLong) as error:
            raise _Ended from error
        raise _Ended

    def _answer_to(self, call: int, kind: type[Reply]) -> Reply:
        """Wait for the answer to a message, and keep all other messages for later. Raises _Ended and its error."""
        while True:
            message = self._received()
            if getattr(message, "id", None) != call:
                self._arrived.append(message)
            elif isinstance(message, Rejected):
                raise message.error
            elif isinstance(message, kind):
                return message

    def _called(self, message: Callable[[int], ToChild], kind: type[Reply]) -> Reply | None:
        """Return the answer to a call, or None if another engine has replaced this one."""
        if self._other is None:
            try:
                call = next(self._engine_ids)
                self._send(message(call))
                return self._answer_to(call, kind)
            except _Ended:
                self._replace()
        return None

    def _replace(self) -> None:
        """Continue with another engine, and repeat the unfinished requests."""
        self._link.close()
        unfinished, self._unfinished, before = [*self._unfinished.values()], {}, self._cancels
        self._arrived.clear()
        self._progress = []
        has_crashed = any(request.is_taken for request in unfinished)
        if has_crashed:
            self._note("the background engine ended unexpectedly, so this process continues the answer itself")
        self._other = self._open_here() if has_crashed else self._rejoin()
        self.load_s = self._other.load_s
        for request in unfinished:
            request.deltas.start_again()
            try:
                self._unfinished[self._other.submit(request.request)] = request
            except LlmrunError as error:
                if not request.is_taken:
                    raise
                self._failed.append(Failed(request.number, error))
        if self._cancels != before:
            self._other.cancel_current()

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
