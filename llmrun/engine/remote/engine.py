"""RemoteEngine, which has the interface of Engine for a model on a server.

Each running request has a thread that waits for the server and puts everything received into a shared queue. `step`
reads this shared queue. Everything else runs in the caller's thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.types import FinishReason, ModelInfo
from llmrun.engine.base import request_timings
from llmrun.engine.remote.client import Call, RemoteModel
from llmrun.engine.remote.request import RemoteRequest, parse_endpoint, remote_request
from llmrun.engine.requests import (
    ChatPrompt,
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Request,
    StatePlace,
    TextDelta,
    TokenLogprobs,
)
from llmrun.engine.thinking import Split, ThinkingSplitter, ThinkingStyle

if TYPE_CHECKING:
    from llmrun.engine.base import ShownTemplate, ThinkingSupport, ToolSupport
    from llmrun.engine.remote.stream import Chunk, Usage

_AWAKE_S = 0.25  # the time that `step` waits before it reports that nothing has arrived yet
_MOST_TOKENS = 1 << 20  # the maximum length of an answer if the request does not limit it
_TAGS = ThinkingStyle(
    "<think>", ("</think>",)
)  # the tags that servers leave in the text if they do not separate thinking
_MORE_EVENTS = 1024  # A stream may have this many events besides its tokens: its start, its end and keep-alives.


@dataclass(slots=True, eq=False)
class _RemoteAnswer:
    """The state of a request until its last event.

    moments       the arrival time of each piece of text or reasoning
    first_answer  the arrival time of the first text of the answer itself
    splitter      separates thinking that the server left in the text; None if the server separates it
    """

    request_id: int
    request: Request
    wire: RemoteRequest
    submitted: float
    last_cancel: int
    call: Call = field(default_factory=Call)
    moments: list[float] = field(default_factory=list)
    finish: str = "stop"
    usage: Usage | None = None
    first_answer: float | None = None
    splitter: ThinkingSplitter | None = None
    over: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.request.prompt, ChatPrompt):
            self.splitter = ThinkingSplitter(_TAGS)

    def accept(self, chunk: Chunk) -> list[Event]:
        """Return the events for a chunk."""
        self.usage = chunk.usage or self.usage
        self.finish = chunk.finish or self.finish
        if not (chunk.text or chunk.reasoning or chunk.tool_calls):
            return []
        self.moments.append(chunk.arrived)
        split = self.splitter.feed(chunk.text) if self.splitter else Split(answer=chunk.text)
        if chunk.reasoning and self.splitter:
            split.answer += self.splitter.finish().answer
            self.splitter = None
        if split.answer and (self.first_answer is None or split.unopened):
            self.first_answer = chunk.arrived
        logprobs = tuple(TokenLogprobs(chosen, top) for chosen, top in chunk.logprobs)
        reasoning = chunk.reasoning + split.thought
        tentative = self.splitter is not None and self.splitter.tentative
        return [
            TextDelta(
                request_id=self.request_id,
                text=split.answer,
                tokens=(),
                logprobs=logprobs,
                reasoning=reasoning,
                unopened=split.unopened,
                tentative=tentative,
                tool_calls=chunk.tool_calls,
            )
        ]

    def end(self, ended: float, reason: FinishReason, load_s: float) -> list[Event]:
        """Return events for the text that is still buffered, followed by the Finished event."""
        self.over = True
        held = self.splitter.finish() if self.splitter else Split()
        if not self.moments and reason is not FinishReason.CANCELLED:
            self.moments.append(ended)  # Without any text, the end token counts as the only token.
        prompt, cached, generated, thinking = 0, 0, len(self.moments), 0
        if self.usage is not None:
            prompt, cached = self.usage.prompt_tokens, self.usage.cached_tokens
            thinking = self.usage.reasoning_tokens
            generated = self.usage.completion_tokens or generated
        timings = request_timings(
            load_s=load_s,
            submitted=self.submitted,
            prefill_started=self.submitted,
            step_times=self.moments,
            ended=ended,
            prompt_tokens=prompt,
            cached_tokens=cached,
            generated_tokens=generated,
        )
        first_answer = 0.0 if self.first_answer is None else self.first_answer - self.submitted
        finished = Finished(
            request_id=self.request_id,
            reason=reason,
            stop=None,
            context_used=prompt + generated,
            timings=timings,
            thinking_tokens=thinking,
            first_answer_s=first_answer,
        )
        last = TextDelta(self.request_id, held.answer, (), (), held.thought, held.unopened)
        return [last, finished] if held != Split() else [finished]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message from a request's thread: a chunk, or the end of the answer with its error, if any."""

    answer: _RemoteAnswer
    chunk: Chunk | None
    error: LlmrunError | None = None
    at: float = 0.0


class RemoteEngine:
    """One model of a server that runs up to `info.max_sequences` requests at a time and queues all other requests.

    RemoteEngine has the same interface as Engine. Only `cancel` and `cancel_current` are thread-safe. TTFT is the time
    from `submit` to the arrival of the first text, whether answer or reasoning, and includes the time in the queue.

    left_out  the fields that the server rejected and that are no longer sent, such as "ignore_eos" or "top_k"
    """

    saves_blocks = False

    def __init__(
        self,
        model: RemoteModel,
        *,
        max_sequences: int = 1,
        ignore_eos: bool = False,
        load_s: float = 0.0,
        explain: Callable[[str], None] | None = None,
    ) -> None:
        """Create an engine that owns `model`; `close` closes it. `open` describes the other parameters."""
        self._model = model
        self._ignore_eos = ignore_eos
        self._explain = explain
        self._explained: tuple[str, ...] = ()
        self._waiting: deque[_RemoteAnswer] = deque()
        self._running: dict[int, _RemoteAnswer] = {}
        # A None in the queue wakes `step`, so that it handles cancellations.
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        # As in Engine, other threads and signal handlers may write the following attributes at any time.
        self._cancel_numbers = itertools.count(1)
        self._last_cancel = 0
        self._cancel_wishes: deque[int] = deque()
        self.load_s = load_s
        self.template: ShownTemplate | None = None  # The server applies its own template, and handles thinking.
        self.thinking: ThinkingSupport | None = None
        self.tools: ToolSupport | None = None  # Only the server knows whether its model can call tools.
        self.takes_chats = True  # Servers have a chat template for their models.
        self.sees_images = True  # Servers refuse images that their models cannot read.
        endpoint = model.endpoint
        self.info = ModelInfo(  # unknown sizes are 0
            path=endpoint.base,
            name=endpoint.model,
            architecture="",
            file_type="",
            parameters=0,
            file_bytes=0,
            vocabulary_size=0,
            train_context=0,
            context_size=0,
            max_sequences=max_sequences,
            backend="remote",
            device=endpoint.host,
            threads=0,
            kv_type="",
        )

    @classmethod
    def open(
        cls,
        address: str,
        *,
        max_sequences: int = 1,
        ignore_eos: bool = False,
        offline: bool = False,
        explain: Callable[[str], None] | None = None,
    ) -> RemoteEngine:
        """Connect to the model at `http://host:port/v1#MODEL`. Without `#MODEL`, use the server's only model.

        ignore_eos  ask the server to ignore end tokens and generate max_tokens tokens
        offline     refuse to connect to another machine
        explain     called from `step` with a message if the server rejects a field

        Raises UsageError, NetworkError and ModelNotFound.
        """
        started = time.perf_counter()
        model = RemoteModel.open(parse_endpoint(address), offline=offline)
        return cls(
            model,
            max_sequences=max_sequences,
            ignore_eos=ignore_eos,
            load_s=time.perf_counter() - started,
            explain=explain,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """The fields that the server rejected and that are no longer sent."""
        return self._model.left_out

    @property
    def idle(self) -> bool:
        """True if no request is waiting or running."""
        return not self._waiting and not self._running

    def prompt_tokens(self, request: Request) -> int | None:
        """Return None, because only the server has the tokenizer."""
        del request
        return None

    def submit(self, request: Request) -> int:
        """Send or queue a request and return its ID. `Timings` are measured from this call. Raises UsageError."""
        last_cancel = self._last_cancel
        submitted = time.perf_counter()
        wire = remote_request(request, self.info.name, ignore_eos=self._ignore_eos)
        answer = _RemoteAnswer(next(self._ids), request, wire, submitted, last_cancel)
        self._waiting.append(answer)
        self._start_waiting()
        return answer.request_id

    def step(self) -> list[Event]:
        """Wait until a message from a server arrives, and return the resulting events.

        If no message arrives for a moment, return PrefillProgress events for the requests that have no answer yet. A
        request that fails ends with Failed, and all other requests continue.
        """
        events: list[Event] = []
        while True:
            while not self._arrivals.empty():  # Only this thread reads the queue, so `get` does not block.
                events += self._take(self._arrivals.get())
            events += self._end_cancelled()
            self._start_waiting()
            if events or self.idle:
                return events
            try:
                events += self._take(self._arrivals.get(timeout=_AWAKE_S))
            except queue.Empty:
                return [*self.prefill_progress()]

    def prefill_progress(self) -> list[PrefillProgress]:
        """Return the progress of each request that has no answer yet. Only llmrun servers report it. Thread-safe."""
        waiting = [one for one in [*self._running.values()] if not one.moments]
        states = [(one.request_id, one.call.prompt) for one in waiting]
        return [PrefillProgress(number, state.done, state.total, image=state.image) for number, state in states]

    def generate(self, request: Request) -> Iterator[Event]:
        """Submit one request and yield its events, the last of which is Finished.

        The request is submitted when the first event is requested. Closing the iterator early cancels the request.
        Raises the errors of `submit`, the error of a Failed event, and UsageError while other requests are unfinished.
        """
        if not self.idle:
            raise UsageError("cannot generate while other requests are unfinished: use submit and step instead")
        request_id = self.submit(request)
        try:
            yield PrefillProgress(request_id, 0, 0)
            while not self.idle:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            self._drop_all()

    def cancel(self, request_id: int) -> None:
        """Cancel a request, so that the next `step` ends it with Finished(CANCELLED). Ignores unknown and ended IDs."""
        self._cancel_wishes.append(request_id)
        self._arrivals.put(None)

    def cancel_current(self) -> None:
        """Cancel all waiting and running requests immediately. Any thread or signal handler may call this method."""
        self._last_cancel = next(self._cancel_numbers)
        for answer in list(self._running.values()):
            answer.call.stop()
        self._arrivals.put(None)

    def use_state(self, place: StatePlace | None, report: Callable[[str], None]) -> None:
        """Do nothing, because only the server has the KV cache."""

    def save_state(self, most: int | None = None) -> None:
        """See `use_state`."""

    def close(self) -> None:
        """Drop all requests and close all connections. Idempotent."""
        self._drop_all()
        self._model.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.info.max_sequences:
            answer = self._waiting.popleft()
            self._running[answer.request_id] = answer
            threading.Thread(target=self._run, args=(answer,), name="llmrun-remote", daemon=True).start()

    def _run(self, answer: _RemoteAnswer) -> None:
        """Put everything that a request receives into the queue. The request's thread runs this method."""
        error: LlmrunError | None = None
        try:
            most = _MOST_TOKENS if answer.request.max_tokens is None else answer.request.max_tokens
            wire = answer.wire
            for chunk in self._model.stream(
                wire.path, wire.body, wire.extras, answer.call, most_events=most + _MORE_EVENTS
            ):
                self._arrivals.put(_Arrival(answer, chunk))
        except LlmrunError as refused:
            error = refused
        except BaseException as wrong:  # noqa: BLE001 (passed on to the thread that waits)
            error = LlmrunError(f"internal: {self.info.device}: {type(wrong).__name__}")
            error.__cause__ = wrong
        self._arrivals.put(_Arrival(answer, None, error, time.perf_counter()))

    def _take(self, arrival: _Arrival | None) -> list[Event]:
        if arrival is None or arrival.answer.over:
            return []
        answer = arrival.answer
        if arrival.chunk is not None:
            return answer.accept(arrival.chunk)
        if answer.call.stopped:
            return []  # `_end_cancelled` will end this request.
        del self._running[answer.request_id]
        if arrival.error is not None:
            answer.over = True
            return [Failed(answer.request_id, arrival.error)]
        self._tell_left_out()
        known = {"length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS}
        reason = known.get(answer.finish, FinishReason.STOP)
        return answer.end(arrival.at, reason, self.load_s)

    def _tell_left_out(self) -> None:
        if self.left_out != self._explained and self._explain is not None:
            self._explain(f"{self.info.device} does not support {', '.join(self.left_out)}: continuing without")
        self._explained = self.left_out

    def _end_cancelled(self) -> list[Event]:
        events: list[Event] = []
        named = {self._cancel_wishes.popleft() for _ in range(len(self._cancel_wishes))}
        for answer in [*self._waiting, *self._running.values()]:
            if answer.request_id in named or answer.last_cancel != self._last_cancel:
                answer.call.stop()
                self._running.pop(answer.request_id, None)
                events += answer.end(time.perf_counter(), FinishReason.CANCELLED, self.load_s)
        if any(answer.over for answer in self._waiting):
            self._waiting = deque(answer for answer in self._waiting if not answer.over)
        return events

    def _drop_all(self) -> None:
        self._waiting.clear()
        while self._running:
            answer = self._running.popitem()[1]
            answer.over = True
            answer.call.stop()
