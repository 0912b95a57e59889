"""A served model whose engine runs in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from llmrun.base.amounts import format_expected, format_percent
from llmrun.base.errors import LlmrunError, Unavailable, UsageError
from llmrun.engine.child.messages import (
    TO_CHILD,
    Ask,
    Beat,
    Begun,
    Cancel,
    CountPrompt,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    FromChild,
    Open,
    Prefilling,
    PrefixExplained,
    Preparing,
    PromptCounted,
    PromptRendered,
    Rejected,
    RenderPrompt,
    Spell,
    Spelled,
    Stepped,
    Taken,
    Tokenize,
    Tokenized,
    cancelled_unbegun,
)
from llmrun.engine.requests import Failed, Finished, ModelFacts
from llmrun.serving.processes.request import (
    MOST_DEATHS,
    Phase,
    ServedRequest,
    ended_repeatedly,
    replay_order,
    sort_out,
)
from llmrun.serving.processes.served_model import Load, State
from llmrun.serving.processes.supervisor import ServingLimits, Supervisor, Waiting

if TYPE_CHECKING:
    from llmrun.engine.child.messages import ToChild
    from llmrun.engine.requests import Event, PrefillProgress, Request


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has no answer yet.

    is_sent  True if the call was sent to the current process
    deaths   the number of processes that ended after receiving the call
    """

    tenant: str
    message: bytes
    result: asyncio.Future[Any]
    is_sent: bool = False
    deaths: int = 0


class Calls:
    """The calls that have no answer yet. While the process restarts, calls wait, like requests.

    on_over  called when a call is over
    """

    def __init__(self, limits: ServingLimits, supervisor: Supervisor, on_over: Callable[[], None]) -> None:
        self._limits, self._supervisor, self._on_over = limits, supervisor, on_over
        self._calls: dict[int, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, call_id: int, message: ToChild, tenant: str) -> Any:
        """Send a message, and return the result of the call. Raises Overloaded, and the errors given to `fail`."""
        data = TO_CHILD.encode(message)
        sent = [Waiting(each.tenant, len(each.message), each.result.cancelled()) for each in self._calls.values()]
        self._limits.check_room(sent, tenant, len(data), retry_after=1.0)
        call = self._calls[call_id] = _Call(tenant, data, asyncio.get_running_loop().create_future())
        if self._supervisor.state is State.READY:
            self._send(call)
        try:
            return await call.result
        except asyncio.CancelledError:  # the client has left
            if call.is_sent:
                self._supervisor.send(TO_CHILD.encode(Cancel((call_id,))))
            raise
        finally:
            if not call.is_sent:  # the client has left, and no process received the call
                self._pop(call_id)

    def send_held(self) -> None:
        """Send the oldest call held for a new process. Each call runs alone, because any call may crash the process."""
        held = next((call for call in self._calls.values() if not call.is_sent), None)
        if held is not None and self._supervisor.state is State.READY:
            self._send(held)

    def hold(self, reason: str) -> None:
        """Keep all calls for the next process. A call fails if processes have ended too often during the call."""
        for call_id, call in list(self._calls.items()):
            call.deaths += call.is_sent
            call.is_sent = False
            if call.deaths >= MOST_DEATHS or call.result.done():
                self.fail(call_id, ended_repeatedly(reason))

    def end(self, call_id: int, result: Any) -> None:
        """Set the result of a call. Unknown calls are ignored."""
        if (waiting := self._pop(call_id)) is not None:
            waiting.set_result(result)

    def fail(self, call_id: int, error: LlmrunError) -> None:
        """End a call with an error. Unknown calls are ignored."""
        if (waiting := self._pop(call_id)) is not None:
            waiting.set_exception(error)

    def fail_all(self, error: LlmrunError) -> None:
        """End all calls with an error."""
        for call_id in list(self._calls):
            self.fail(call_id, error)

    def _send(self, call: _Call) -> None:
        call.is_sent = True
        self._supervisor.send(call.message)

    def _pop(self, call_id: int) -> asyncio.Future[Any] | None:
        """Remove a call, and return its future if the future has no result yet."""
        ended = self._calls.pop(call_id, None)
        self._on_over()
        self.send_held()
        return None if ended is None or ended.result.done() else ended.result


_LOG_S: Final = 10.0  # seconds between two lines of the log about one prompt
_COUNTS: Final = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")


def _ignore(*_: object) -> None:
    """Ignore progress reports and notes."""


def _remaining(seconds: float | None) -> str:
    """Return the words that follow the progress of a prompt."""
    return "" if seconds is None else f", {format_expected(seconds)} left"


class ModelProcess:
    """A ServedModel. All methods must be called on the event loop that runs `start`."""

    def __init__(
        self,
        model: Open,
        limits: ServingLimits | None = None,
        *,
        command: Sequence[str] | None = None,
        loading: Callable[[str, float], None] = _ignore,
        note: Callable[[str], None] = _ignore,
        detail: Callable[[str], None] = _ignore,
        prompts: Callable[[str], None] = _ignore,
    ) -> None:
        """Create a served model without opening it.

        command  the command that starts the process, for tests
        loading  called with the progress of opening the model, like `OpenOptions.progress`
        note     called with messages for the log, such as the reason for a restart
        detail   called with details for the log, such as why a backend was chosen
        prompts  called with the progress of long prompts, for the log
        """
        self._name, self._prompts = model.name, prompts
        self._limits = limits or ServingLimits()
        self._supervisor = Supervisor(
            model, self._limits, self, command=command, loading=loading, note=note, detail=detail
        )
        self._ids = itertools.count(1)
        self._requests: dict[int, ServedRequest] = {}  # requests that are not over, or that the process still runs
        self._parts: dict[int, list[Embedded]] = {}  # the partial results of calls to `embed`
        self._alone: ServedRequest | None = None  # the request whose first step is running alone
        self._preparing: ServedRequest | None = None  # the last request that the process began to prepare
        self._beat = Beat(busy=False)
        self._past = Beat(busy=False)  # the total counts of all previous processes
        self._draining = False
        self._some_over = asyncio.Event()
        self._calls = Calls(self._limits, self._supervisor, self._some_over.set)

    @property
    def facts(self) -> ModelFacts | None:
        """See ServedModel."""
        return self._supervisor.facts

    @property
    def state(self) -> State:
        """See ServedModel."""
        return State.DRAINING if self._draining else self._supervisor.state

    @property
    def pid(self) -> int | None:
        """The ID of the engine's process, or None before `start`."""
        return self._supervisor.pid

    @property
    def load(self) -> Load:
        """See ServedModel. Restarts of the process do not reset the counts."""
        beat, supervisor = self._beat, self._supervisor
        unfinished = [request for request in self._requests.values() if not request.over]
        phases = [request.phase for request in unfinished]
        prompts = [request.progress for request in unfinished if request.progress is not None]
        return Load(
            beat_age_s=supervisor.beat_age_s,
            running=phases.count(Phase.BEGUN) + len(self._calls),
            waiting=len(phases) - phases.count(Phase.BEGUN),
            free_tokens=beat.free_tokens,
            wait_s=supervisor.expected_s if supervisor.state is State.RESTARTING else beat.wait_s,
            restarts=supervisor.restarts,
            processing_tokens=sum(prompt.total for prompt in prompts),
            remaining_tokens=sum(prompt.total - prompt.done for prompt in prompts),
            **self._counts(),
        )

    def _counts(self) -> dict[str, int]:
        """Return the total counts of the current process and all previous processes."""
        return {name: getattr(self._past, name) + getattr(self._beat, name) for name in _COUNTS}

    @property
    def most_requests(self) -> int:
        """See ServedModel."""
        return self._limits.share_of(self._limits.max_queue)

    @property
    def most_bytes(self) -> int:
        """See ServedModel."""
        return self._limits.share_of(self._limits.queue_bytes)

    async def start(self) -> None:
        """See ServedModel."""
        await self._supervisor.start()

    def ask(self, request: Request, news: asyncio.Event) -> ServedRequest:
        """See ServedModel. Raises UsageError if JSON cannot represent the request."""
        self._check_available()
        request_id, received = next(self._ids), time.perf_counter()
        try:
            message = TO_CHILD.encode(Ask(request_id, request, received))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"request cannot be represented in JSON: {' '.join(str(error).split())[:200]}") from error
        waiting = [each for each in self._requests.values() if each.waits]
        sent = [Waiting(each.request.tenant, each.n_bytes, each.cancelled) for each in waiting]
        self._limits.check_room(sent, request.tenant, len(message), retry_after=max(1.0, self.load.wait_s))
        served = ServedRequest(
            id=request_id,
            request=request,
            received=received,
            n_bytes=len(message),
            unread_bytes=self._limits.unread_bytes,
            news=news,
            on_over=self._some_over.set,
            on_cancel=self._cancel,
        )
        self._requests[request_id] = served
        if self._supervisor.state is State.READY:
            self._send(served, message)
        return served

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool, tenant: str = "") -> list[int]:
        """See ServedModel."""
        call = next(self._ids)
        tokens: list[int] = await self._call(call, Tokenize(call, text, add_special, parse_special, tenant), tenant)
        return tokens

    async def detokenize(self, tokens: Sequence[int], *, tenant: str = "") -> bytes:
        """See ServedModel."""
        call = next(self._ids)
        data: bytes = await self._call(call, Detokenize(call, tokens, tenant), tenant)
        return data

    async def spell(self, tokens: Sequence[int], *, tenant: str = "") -> Sequence[bytes]:
        """See ServedModel."""
        call = next(self._ids)
        pieces: Sequence[bytes] = await self._call(call, Spell(call, tokens, tenant), tenant)
        return pieces

    async def count_prompt(self, request: Request) -> int:
        """See ServedModel."""
        call = next(self._ids)
        tokens: int = await self._call(call, CountPrompt(call, request), request.tenant)
        return tokens

    async def render_prompt(self, request: Request) -> str:
        """See ServedModel."""
        call = next(self._ids)
        text: str = await self._call(call, RenderPrompt(call, request), request.tenant)
        return text

    async def embed(self, wanted: Embed) -> Embedded:
        """See ServedModel."""
        call = next(self._ids)
        parts = self._parts[call] = list[Embedded]()
        try:
            await self._call(call, structs.replace(wanted, id=call), wanted.tenant)
        finally:
            del self._parts[call]
        tokens = [n for part in parts for n in part.tokens]
        return Embedded(call, b"".join(part.data for part in parts), tokens)

    async def drain(self, seconds: float) -> None:
        """See ServedModel."""
        self._draining = True
        error = Unavailable("the server is shutting down", state="draining")
        for request in list(self._requests.values()):
            if request.waits:
                self._abort(request, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._calls or any(not request.over for request in self._requests.values()):
                    self._some_over.clear()
                    await self._some_over.wait()
        for request in list(self._requests.values()):
            self._abort(request, error)
        self._calls.fail_all(error)

    async def close(self) -> None:
        """See ServedModel."""
        self._draining = True
        self._end_all(Unavailable("the server is shutting down", state="draining"))
        await self._supervisor.close()

    def take(self, message: FromChild) -> None:
        """Handle a message from the process. The supervisor calls this method."""
        match message:
            case Preparing(id=request_id):
                self._preparing = self._requests.get(request_id)
            case Taken():
                self._accept(message)
            case PrefixExplained(id=request_id, prefix=prefix):
                if (request := self._requests.get(request_id)) is not None and request.taken is not None:
                    request.taken = structs.replace(request.taken, prefix=prefix)
            case Begun(ids=ids):
                self._begin(ids)
            case Stepped(events=events, beat=beat):
                self._alone = None
                self._beat = beat or self._beat
                for event in events:
                    self._pass_on(event)
            case Prefilling(events=prompts):
                for prompt in prompts:
                    self._pass_on(prompt)
                    self._log_progress(prompt)
            case Beat():
                self._beat = message
            case Rejected():
                self._reject(message)
            case (
                Tokenized(id=call, tokens=result)
                | Detokenized(id=call, data=result)
                | Spelled(id=call, pieces=result)
                | PromptCounted(id=call, tokens=result)
                | PromptRendered(id=call, text=result)
            ):
                self._calls.end(call, result)
            case Embedded(id=call):
                if call in self._parts:
                    self._parts[call].append(message)
                if message.is_last:
                    self._calls.end(call, None)

    def process_ended(self, reason: str) -> None:
        """Prepare all requests for the next process. The supervisor calls this method."""
        self._past = Beat(busy=False, **self._counts())
        self._beat = Beat(busy=False)
        invariant = self.facts is not None and self.facts.info.batch_invariant
        requests = list(self._requests.values())
        sort_out(requests, self._alone, self._preparing, batch_invariant=invariant, reason=reason)
        self._alone = self._preparing = None
        self._requests = {key: request for key, request in self._requests.items() if not request.over}
        for parts in self._parts.values():
            parts.clear()  # the next process computes all parts again
        self._calls.hold(reason)

    def process_ready(self) -> None:
        """Send all requests to the new process. The supervisor calls this method."""
        for request in replay_order(list(self._requests.values())):
            message = Ask(
                request.id,
                request.request,
                request.received,
                admitted=request.taken is not None,
                alone=request.has_begun,
            )
            self._send(request, TO_CHILD.encode(message))
        self._calls.send_held()

    def supervision_ended(self, error: BaseException) -> None:
        """End all requests because of a bug. The supervisor calls this method."""
        self._end_all(LlmrunError(f"bug in llmrun: {type(error).__name__}: {error}"))

    def _check_available(self) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down", state="draining")
        supervisor = self._supervisor
        if not (supervisor.state is State.READY or supervisor.ready_soon):
            state, wait_s = supervisor.state, max(1.0, supervisor.expected_s)
            known = {State.LOADING: "is being loaded", State.RESTARTING: "is being restarted"}
            words = f"the model {known.get(state, 'cannot be used')}: {self._name}"
            raise Unavailable(words, state=state.value, retry_after=wait_s)

    def _send(self, request: ServedRequest, message: bytes) -> None:
        request.phase = Phase.SENT
        self._supervisor.send(message)

    async def _call(
        self, call: int, message: Tokenize | Detokenize | Spell | CountPrompt | RenderPrompt | Embed, tenant: str
    ) -> Any:
        self._check_available()
        return await self._calls.run(call, message, tenant)

    def _accept(self, taken: Taken) -> None:
        request = self._requests.get(taken.id)
        if request is not None:
            request.phase = Phase.QUEUED
            request.accept(taken)

    def _begin(self, ids: Sequence[int]) -> None:
        begun = [request for request_id in ids if (request := self._requests.get(request_id)) is not None]
        self._alone = begun[0] if len(ids) == len(begun) == 1 and begun[0].has_begun else None
        for request in begun:
            request.phase = Phase.BEGUN
            request.has_begun = True
            request.begun_at = request.begun_at or time.perf_counter()

    def _pass_on(self, event: Event) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        was_over = request.over
        request.put(event)
        if isinstance(event, Finished | Failed):
            del self._requests[request.id]
        elif request.over and not was_over:
            self._cancel_in_process(request)

    def _log_progress(self, prompt: PrefillProgress) -> None:
        """Log the progress of a long prompt, at most every _LOG_S seconds."""
        request, now = self._requests.get(prompt.request_id), time.perf_counter()
        if request is not None and not request.over and now - max(request.begun_at, request.told_at) >= _LOG_S:
            request.told_at = now
            if prompt.image is not None:
                self._prompts(prompt.image.words)
                return
            done = f"{prompt.done:,} of {prompt.total:,} tokens ({format_percent(prompt.done / prompt.total)})"
            self._prompts(f"processing prompt: {done}{_remaining(prompt.left_s)}")

    def _reject(self, rejected: Rejected) -> None:
        self._calls.fail(rejected.id, rejected.error)
        request = self._requests.pop(rejected.id, None)
        if request is not None and request.cancelled:
            request.put(cancelled_unbegun(request.id))
        elif request is not None:
            request.fail(rejected.error)

    def _cancel(self, request: ServedRequest) -> None:
        """Cancel a request, which then ends with Finished. Requests that have already ended are ignored."""
        if request.over or request.cancelled:
            return
        request.cancelled = True
        if request.phase is Phase.HELD:
            self._requests.pop(request.id, None)
            request.put(cancelled_unbegun(request.id))
        else:
            self._cancel_in_process(request)

    def _abort(self, request: ServedRequest, error: LlmrunError) -> None:
        """End a request with an error."""
        if request.over:
            return
        request.fail(error)
        if request.phase is Phase.HELD:
            self._requests.pop(request.id, None)
        else:
            self._cancel_in_process(request)

    def _cancel_in_process(self, request: ServedRequest) -> None:
        request.cancelled = True
        self._supervisor.send(TO_CHILD.encode(Cancel((request.id,))))

    def _end_all(self, error: LlmrunError) -> None:
        for request in self._requests.values():
            request.fail(error)
        self._requests.clear()
        self._calls.fail_all(error)
